"""Local reparameterisation and Flipout against the exact moments of weight draws.

A layer's output is linear in its weights, so over weight draws it is Gaussian with covariance J·diag(σ²)·Jᵀ, where J
is its Jacobian by the weights: no sampling error on that side.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from credo.core.network.layer_hooks import hooked
from credo.methods import BBB
from credo.methods.bbb.activation_noise import NOISES

CASES = {
    "linear": (lambda: nn.Linear(4, 3), (2, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (2, 4)),
    "linear over positions": (lambda: nn.Linear(3, 2), (2, 3, 3)),
    "conv1d stride padding": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 2, 6)),
    "conv1d circular": (lambda: nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"), (2, 2, 5)),
    "conv2d stride dilation": (lambda: nn.Conv2d(2, 2, 2, stride=2, padding=1, dilation=2), (2, 2, 5, 5)),
    "conv2d groups": (lambda: nn.Conv2d(4, 4, 2, groups=2), (2, 4, 3, 3)),
    "conv2d same reflect": (lambda: nn.Conv2d(1, 2, 3, padding="same", padding_mode="reflect"), (2, 1, 3, 3)),
    "conv2d depthwise circular": (lambda: nn.Conv2d(2, 4, 3, 1, 1, groups=2, padding_mode="circular"), (2, 2, 3, 3)),
    "conv3d stride padding": (lambda: nn.Conv3d(1, 2, 2, stride=2, padding=1), (2, 1, 3, 3, 3)),
}


class Case:
    """A layer with standard deviations for its parameters, an input, and the exact moments of the output."""

    def __init__(self, name: str) -> None:
        make, shape = CASES[name]
        torch.manual_seed(0)
        self.layer = make().double()
        self.x = torch.randn(shape, dtype=torch.float64)
        parameters = dict(self.layer.named_parameters())
        self.std = {key: 0.2 + 0.5 * torch.rand_like(p) for key, p in parameters.items()}
        self.mean = self.layer(self.x).detach()
        jacobian = jacrev(lambda p: functional_call(self.layer, p, (self.x,)).flatten(1))(parameters)
        columns = [(jacobian[key] * self.std[key]).flatten(2) for key in parameters]
        root = torch.cat(columns, dim=2).detach()  # [batch, outputs, weights]
        self.covariance = root @ root.mT
        self.between = root[0] @ root[1].mT

    @torch.no_grad()
    def sample(self, noise: str, count: int) -> Tensor:
        """[count, batch, outputs], one independent pass each."""
        generator = torch.Generator().manual_seed(1)
        if noise == "lrt":  # independent over examples: one pass of a large batch is many passes
            inputs = self.x.repeat(count, *[1] * (self.x.dim() - 1))
            out = self._pass(noise, inputs, generator)
            return out.reshape(count, len(self.x), -1)
        return torch.stack([self._pass(noise, self.x, generator).flatten(1) for _ in range(count)])

    def _pass(self, noise: str, x: Tensor, generator: torch.Generator) -> Tensor:
        with hooked({"": self.layer}, NOISES[noise](self.std, generator)):
            return self.layer(x)


def check_marginals(samples: Tensor, mean: Tensor, variance: Tensor) -> None:
    # At most 75 Gaussian outputs, each by its mean and its variance, at 5.5 standard errors: false alarms below 6e-6.
    count = len(samples)
    z_mean = (samples.mean(0) - mean) / (variance / count).sqrt()
    z_variance = (samples.var(0) / variance - 1) / (2 / count) ** 0.5
    assert z_mean.abs().max() < 5.5
    assert z_variance.abs().max() < 5.5


@pytest.mark.parametrize("name", CASES)
def test_lrt_marginals_of_each_output_equal_those_of_weight_draws(name: str) -> None:
    case = Case(name)
    check_marginals(case.sample("lrt", 10_000), case.mean.flatten(1), case.covariance.diagonal(dim1=1, dim2=2))


@pytest.mark.part(3)
@pytest.mark.parametrize("name", CASES)
def test_flipout_has_the_joint_moments_of_weight_draws_within_an_example(name: str) -> None:
    case = Case(name)
    samples = case.sample("flipout", 2000)
    variance = case.covariance.diagonal(dim1=1, dim2=2)
    check_marginals(samples, case.mean.flatten(1), variance)
    samples = samples - case.mean.flatten(1)
    estimate = torch.einsum("sbi,sbj->bij", samples, samples) / len(samples)
    error = ((variance.unsqueeze(2) * variance.unsqueeze(1) + case.covariance.square()) / len(samples)).sqrt()
    # Up to 2 600 different entries of Gaussian covariances at 6 standard errors: false alarms below 1e-5.
    assert ((estimate - case.covariance).abs() / error).max() < 6


@pytest.mark.parametrize("name", ["linear", "conv2d groups"])
def test_flipout_decorrelates_examples_that_a_weight_draw_moves_together(name: str) -> None:
    case = Case(name)
    samples = case.sample("flipout", 2000) - case.mean.flatten(1)
    products = samples[:, 0].unsqueeze(2) * samples[:, 1].unsqueeze(1)
    # At most 256 means of 2 000 heavy-tailed products at 6 of their own standard errors: false alarms about 1e-6.
    z = products.mean(0) / (products.std(0) / len(products) ** 0.5)
    assert z.abs().max() < 6
    assert (case.between.abs() / (products.std(0) / len(products) ** 0.5)).max() > 10


def test_flipout_flips_inputs_as_well_as_outputs() -> None:
    # With signs on the outputs only, two equal examples would get noise of equal size.
    case = Case("linear")
    case.x = case.x[:1].repeat(2, 1)
    noise = case.sample("flipout", 2000) - case.mean[:1].repeat(2, 1)
    scaled = case.x[0] * case.std["weight"]
    variance = case.covariance[0].diagonal()
    # E[n₁²n₂²] = V² + 2Σ(x·σ)⁴ over weights and bias, against 3V² for equal sizes.
    expected = variance.square() + 2 * (scaled.pow(4).sum(1) + case.std["bias"].pow(4))
    products = noise[:, 0].square() * noise[:, 1].square()
    error = products.std(0) / len(products) ** 0.5
    # Three heavy-tailed means at six of their own standard errors: false alarms below 1e-6.
    assert ((products.mean(0) - expected) / error).abs().max() < 6
    assert noise[:, 0].abs().sub(noise[:, 1].abs()).abs().max() > 0.1


def test_lrt_of_a_convolution_has_right_marginals_but_independent_positions() -> None:
    # What one gives up with local reparameterisation, and why prediction draws weights.
    case = Case("conv1d circular")
    samples = case.sample("lrt", 20_000) - case.mean.flatten(1)
    estimate = torch.einsum("si,sj->ij", samples[:, 0], samples[:, 0]) / len(samples)
    deviation = case.covariance[0].diagonal().sqrt()
    correlation = estimate / (deviation.unsqueeze(0) * deviation.unsqueeze(1))
    truth = case.covariance[0] / (deviation.unsqueeze(0) * deviation.unsqueeze(1))
    others = ~torch.eye(len(deviation), dtype=torch.bool)
    # 45 correlations of independent Gaussians at 5.5 standard errors: false alarms 2e-6.
    assert correlation[others].abs().max() < 5.5 / 20_000**0.5
    assert truth[others].abs().max() > 0.2


@pytest.mark.parametrize("name", ["linear over positions", "conv2d groups"])
def test_draws_of_the_posterior_have_these_moments(name: str) -> None:
    case = Case(name)
    posterior = BBB(case.layer, data_size=1)
    rho = torch.cat([s.expm1().log().reshape(-1) for s in case.std.values()])
    with torch.no_grad():
        posterior.rho.copy_(rho)
        samples = torch.stack([posterior(case.x).flatten(1) for _ in range(2000)])
    check_marginals(samples, case.mean.flatten(1), case.covariance.diagonal(dim1=1, dim2=2))
    products = (samples[:, 0] - case.mean.flatten(1)[0]).unsqueeze(2) * (
        samples[:, 1] - case.mean.flatten(1)[1]
    ).unsqueeze(1)
    # One weight draw for the whole batch: at most 256 covariances between examples at 6 standard errors, below 1e-6.
    z = (products.mean(0) - case.between) / (products.std(0) / len(products) ** 0.5)
    assert z.abs().max() < 6


@pytest.mark.parametrize("noise", ["lrt", "flipout"])
@pytest.mark.parametrize("only", ["weight", "bias"])
def test_only_the_random_part_of_a_layer_is_noisy(noise: str, only: str) -> None:
    case = Case("conv1d stride padding")
    jacobian = jacrev(lambda p: functional_call(case.layer, p, (case.x,)).flatten(1))(
        dict(case.layer.named_parameters())
    )
    variance = (jacobian[only] * case.std[only]).flatten(2).square().sum(2).detach()
    case.std = {only: case.std[only]}
    check_marginals(case.sample(noise, 2000), case.mean.flatten(1), variance)


@pytest.mark.parametrize("noise", ["lrt", "flipout"])
def test_gradients_by_the_standard_deviation_are_those_of_the_noise(noise: str) -> None:
    # E[(out − mean)²] summed is the summed variance, so its gradient by σ is 2σ·Σ(∂out/∂w)².
    case = Case("linear")
    std = {key: s.clone().requires_grad_() for key, s in case.std.items()}
    generator = torch.Generator().manual_seed(2)
    gradients = []
    for _ in range(1500):
        with hooked({"": case.layer}, NOISES[noise](std, generator)):
            square = (case.layer(case.x) - case.mean).square().sum()
        gradients.append(torch.autograd.grad(square, std["weight"])[0])
    sample = torch.stack(gradients)
    expected = 2 * case.std["weight"] * case.x.square().sum(0)
    # 12 means at six of their own standard errors: false alarms below 1e-6.
    assert ((sample.mean(0) - expected) / (sample.std(0) / len(sample) ** 0.5)).abs().max() < 6
    assert (expected / (sample.std(0) / len(sample) ** 0.5)).max() > 15  # so a missing gradient would be seen


@pytest.mark.parametrize("noise", ["lrt", "flipout"])
def test_zero_inputs_give_finite_gradients(noise: str) -> None:
    layer = nn.Linear(3, 2, bias=False)
    std = {"weight": torch.full((2, 3), 0.1, requires_grad=True)}
    x = torch.zeros(4, 3, requires_grad=True)
    with hooked({"": layer}, NOISES[noise](std, torch.Generator().manual_seed(0))):
        layer(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(std["weight"].grad).all()


@pytest.mark.parametrize(("layer", "shape"), [(nn.Linear(3, 2), (3,)), (nn.Conv1d(2, 2, 2), (2, 5))])
def test_flipout_without_a_batch_dimension_is_refused(layer: nn.Module, shape: tuple[int, ...]) -> None:
    std = {key: torch.ones_like(p) for key, p in layer.named_parameters()}
    with (
        pytest.raises(ValueError, match="batch dimension"),
        hooked({"": layer}, NOISES["flipout"](std, torch.Generator())),
    ):
        layer(torch.ones(shape))
