"""Regression predictions against a slow loop over the same draws."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.likelihood import MIN_STD

DRAWS = 25
Slow = Callable[..., Tensor]
Network = Callable[..., nn.Module]

LIKELIHOODS = {
    "fixed": lambda: credo.GaussianNoise(0.3),
    "learned": lambda: credo.GaussianNoise(0.7, learn=True),
    "heteroscedastic": lambda: credo.GaussianNoise(heteroscedastic=True),
}


def noise_and_mean(name: str, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of each draw, by hand."""
    if name != "heteroscedastic":
        return outputs, torch.full_like(outputs, 0.3 if name == "fixed" else 0.7)
    return outputs[..., :2], F.softplus(outputs[..., 2:]) + MIN_STD


def log_density(y: float, mean: float, std: float) -> float:
    return -0.5 * ((y - mean) / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


@pytest.fixture
def targets() -> Tensor:
    return torch.randn(23, 2, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_against_a_slow_loop(name: str, x: Tensor, targets: Tensor, mlp: Network, slow_outputs: Slow) -> None:
    outputs = 4 if name == "heteroscedastic" else 2
    posterior = credo.BBB(mlp(3, outputs), data_size=10, likelihood=LIKELIHOODS[name](), init=0.4)
    means, stds = noise_and_mean(name, slow_outputs(posterior, x, draws=DRAWS).double())
    prediction = credo.predict(posterior, [(x, targets)], draws=DRAWS, strategy="loop")
    close(prediction.mean, means.mean(0))
    close(prediction.epistemic, means.std(0, correction=0))
    close(prediction.aleatoric, stds.square().mean(0).sqrt())
    close(prediction.total.square(), stds.square().mean(0) + means.var(0, correction=0))
    for i in range(len(x)):
        # The joint density of both outputs under each draw: they share the draw.
        each = [
            sum(log_density(targets[i, j].item(), means[s, i, j].item(), stds[s, i, j].item()) for j in range(2))
            for s in range(DRAWS)
        ]
        expected = torch.tensor(each).logsumexp(0).item() - math.log(DRAWS)
        assert prediction.log_likelihood[i].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_total_is_the_spread_of_new_targets(x: Tensor, mlp: Network, slow_outputs: Slow) -> None:
    """Simulated: draw a network, then noise. False alarm 1e-6: 5 standard errors of each of 23 variances."""
    posterior = credo.BBB(mlp(3, 1), data_size=10, likelihood=credo.GaussianNoise(0.3), init=0.4)
    count = 4000
    means = slow_outputs(posterior, x, draws=count, seed=1)
    new = means + 0.3 * torch.randn(means.shape, generator=torch.Generator().manual_seed(0))
    prediction = credo.predict(posterior, x, draws=count, strategy="loop", seed=2)
    # Two sample variances of a distribution whose kurtosis is taken from the sample.
    fourth = (new - new.mean(0)).pow(4).mean(0)
    error = ((fourth - new.var(0).square()) * 2 / count).sqrt()
    assert ((new.var(0) - prediction.total.square()).abs() / error).max() < 5


def test_large_means_do_not_cancel(x: Tensor, slow_outputs: Slow) -> None:
    """Means near 10⁴ that differ by 0.01: their squares in float32 would differ by nothing."""
    network = nn.Linear(3, 1)
    with torch.no_grad():
        network.weight.zero_()
        network.bias.fill_(1e4)
    posterior = credo.BBB(network, data_size=10, likelihood=credo.GaussianNoise(1.0), init=0.05, random="bias")
    means = slow_outputs(posterior, x, draws=40).double()
    prediction = credo.predict(posterior, x, draws=40, strategy="loop")
    close(prediction.mean, means.mean(0), 1e-6)
    close(prediction.epistemic, means.std(0, correction=0), 1e-3)
    assert prediction.epistemic.min() > 0.03


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.float64])
def test_networks_with_one_number_per_input(target_dtype: torch.dtype, x: Tensor, slow_outputs: Slow) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).squeeze(-1)

    posterior = credo.BBB(Flat(), data_size=10, likelihood=credo.GaussianNoise(0.3), init=0.4)
    means = slow_outputs(posterior, x, draws=DRAWS).double()
    y = torch.linspace(-1, 1, 23, dtype=target_dtype)
    prediction = credo.predict(posterior, [(x, y)], draws=DRAWS, strategy="loop", tolerance=1e-9)
    close(prediction.mean, means.mean(0))
    density = torch.distributions.Normal(means, 0.3).log_prob(y.double())
    close(prediction.log_likelihood, density.logsumexp(0) - math.log(DRAWS), 1e-4)


def test_targets_of_another_shape_are_refused(x: Tensor, mlp: Network) -> None:
    """[batch] against [batch, 1] would compare every input with every other."""
    posterior = credo.BBB(mlp(3, 1), data_size=10, likelihood=credo.GaussianNoise(1.0))
    with pytest.raises(ValueError, match=r"\[23\] for means of shape \[23, 1\]"):
        credo.predict(posterior, [(x, torch.zeros(23))], draws=2)


def test_adaptive_draws_stop_where_the_mean_is_known(mlp: Network, slow_outputs: Slow) -> None:
    """The error is that of the mean as a share of the predictive std; noise makes a rough mean good enough."""
    network = nn.Linear(1, 1)
    with torch.no_grad():
        network.weight.fill_(0.0)
        network.bias.fill_(0.0)
    posterior = credo.BBB(network, data_size=10, likelihood=credo.GaussianNoise(1.0), init=1.0, random="weight")
    x = torch.tensor([[0.0], [0.1], [10.0]])  # epistemic std 0, 0.1 and 10 beside a noise of 1
    prediction = credo.predict(posterior, x, draws=200, tolerance=0.09)
    used = prediction.draws_used.tolist()
    assert used[:2] == [10, 10]
    # 10/√(n·101) < 0.09 from n ≈ 122; the estimate from that many draws is not far off.
    assert 80 <= used[2] <= 170
    error = prediction.epistemic[2] / (prediction.draws_used[2] - 1).sqrt() / prediction.total[2]
    assert error.item() <= 0.09


@pytest.mark.parametrize("std", [1e-25, 1e-12, 1e12, 1e25])
def test_noise_whose_square_float32_cannot_hold(std: float) -> None:
    posterior = credo.MAP(nn.Linear(3, 2), data_size=10, likelihood={"kind": "gaussian", "std": std})
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    found = credo.predict(posterior, [(x, y)])
    for name in ("aleatoric", "total"):
        torch.testing.assert_close(getattr(found, name), torch.full((4, 2), std), rtol=1e-5, atol=0.0)
    scores = credo.measure(found, intervals=False)
    mean = posterior.model(x).detach().double()
    squares = ((y - mean) / std).square() / 2 + math.log(std) + math.log(2 * math.pi) / 2
    assert scores["nll"] == pytest.approx(float(squares.sum(-1).mean()), rel=1e-4)


def test_means_that_differ_by_more_than_float32_can_square() -> None:
    class Far(credo.MAP):
        def draw(self) -> dict[str, Tensor]:
            sign = float(torch.randint(2, (), generator=self.generator)) * 2 - 1
            return {"bias": torch.full((1,), sign * 1e25)}

        is_random = True  # type: ignore[assignment]

    posterior = Far(nn.Linear(2, 1), data_size=10, likelihood=credo.GaussianNoise(1.0))
    found = credo.predict(posterior, torch.zeros(3, 2), draws=100)
    assert bool(torch.isfinite(found.total).all())
    assert 0.8e25 < float(found.epistemic.min()) <= float(found.epistemic.max()) < 1.01e25
