"""K-FAC's curvature, steps and noise against dense matrices, and the posterior that its curvature implies."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F

from credo.core.kronecker import damping_shares
from credo.core.likelihood import Bernoulli, GaussianNoise
from credo.core.prior import Gaussian
from credo.methods.kfac import KFAC
from credo.methods.kfac_blocks import KroneckerBlock
from credo.methods.noisy_kfac import NoisyKFAC

DOUBLE = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    conv = nn.Conv2d(2, 4, 2, groups=2)
    return nn.Sequential(conv, nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()


X = normal(8, 2, 3, 3, seed=1) + 2 * normal(8, 1, 1, 1, seed=2)  # pixels that go together
Y = torch.arange(8) % 3


def nll(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), Y)


def dense(a: Tensor, g: Tensor) -> Tensor:
    """The Fisher matrix over (weight, bias) row by row, as `matrix.flatten()` has them."""
    return torch.kron(g, a)


def matrix_of(weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat([weight.detach().flatten(1), bias.detach().unsqueeze(1)], dim=1)


# -- the curvature --------------------------------------------------------------------------------------------------


def test_for_one_example_the_kronecker_product_is_the_outer_product_of_the_gradient() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).double()
    x, y = normal(1, 4), torch.tensor([2])
    posterior = KFAC(layer, data_size=10, lr=0.0)
    posterior.step(lambda net: F.cross_entropy(net(x), y))
    (block,) = posterior.engine.blocks
    slopes = torch.autograd.grad(F.cross_entropy(layer(x), y), [layer.weight, layer.bias])
    gradient = matrix_of(*slopes).flatten()
    torch.testing.assert_close(dense(block.inputs[0], block.outputs[0]), torch.outer(gradient, gradient))


def test_a_linear_regression_has_the_exact_fisher_matrix() -> None:
    """Output gradients do not depend on inputs in expectation: with drawn labels A ⊗ G is X'X/N ⊗ 1/σ²."""
    x, std = normal(40, 3), 0.5
    torch.manual_seed(0)
    posterior = KFAC(
        nn.Linear(3, 2).double(),
        data_size=40,
        lr=0.0,
        fisher="sampled",
        curvature_decay=0.9999,
        likelihood=GaussianNoise(std),
    )
    for _ in range(500):  # 20 000 draws of each residual: G's entries are within 5 of their std 1/σ²·√2/√20000 ≈ 0.04
        posterior.step(lambda net: posterior.likelihood.nll(net(x), torch.zeros(40, 2, dtype=DOUBLE)))
    (block,) = posterior.engine.blocks
    row = torch.cat([x, torch.ones(40, 1, dtype=DOUBLE)], dim=1)
    torch.testing.assert_close(block.inputs[0], row.T @ row / 40)
    torch.testing.assert_close(block.outputs[0], torch.eye(2, dtype=DOUBLE) / std**2, rtol=0, atol=0.2)


@pytest.mark.parametrize("kind", ["categorical", "bernoulli"])
def test_drawn_labels_give_the_fisher_matrix_of_a_classifier(kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3 if kind == "categorical" else 1).double()
    x = normal(1, 4).expand(50, 4)  # one input: A ⊗ G is exact
    posterior = KFAC(layer, data_size=50, lr=0.0, fisher="sampled", curvature_decay=0.9999, likelihood=kind)
    y = torch.zeros(50, dtype=torch.int64)
    for _ in range(200):  # 10 000 labels: 5 standard deviations of a mean of products below 1 are 0.05
        posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    out = layer(x[0]).detach()
    p = out.softmax(0) if kind == "categorical" else out.sigmoid()
    exact = torch.diag(p) - torch.outer(p, p)
    torch.testing.assert_close(posterior.engine.blocks[0].outputs[0], exact, rtol=0, atol=0.05)
    data = KFAC(layer, data_size=50, lr=0.0, likelihood=kind)
    data.step(lambda net: data.likelihood.nll(net(x), y))
    assert (data.engine.blocks[0].outputs[0] - exact).abs().max() > 0.1  # the data's labels tell something else


def test_a_bernoulli_likelihood_draws_both_labels() -> None:
    from credo.methods.kfac_labels import sampled_targets

    generator = torch.Generator().manual_seed(0)
    drawn = sampled_targets(Bernoulli(), torch.full((20000, 1), math.log(3.0)), generator)
    assert drawn.double().mean() == pytest.approx(0.75, abs=0.0155)  # 5 standard deviations


def test_factors_are_averaged_plainly_at_first_and_then_with_the_decay() -> None:
    torch.manual_seed(0)
    posterior = KFAC(nn.Linear(1, 1, bias=False).double(), data_size=10, lr=0.0, curvature_decay=0.6)
    seen = []
    for value in (1.0, 2.0, 3.0, 4.0):
        x = torch.full((2, 1), value, dtype=DOUBLE)
        posterior.step(lambda net, x=x: net(x).mean())
        seen.append(float(posterior.engine.blocks[0].inputs))
    third = (1 + 4) / 2 * 0.6 + 0.4 * 9  # 1 − 1/3 is more than the decay
    assert seen == pytest.approx([1, 2.5, third, 0.6 * third + 0.4 * 16])


# -- a step ---------------------------------------------------------------------------------------------------------


def damped(block: KroneckerBlock, damping: float) -> list[tuple[Tensor, Tensor]]:
    """A' and G' of every group."""
    shares = damping_shares(block.inputs, block.outputs, damping)
    return [
        (a + for_a * torch.eye(len(a), dtype=DOUBLE), g + for_g * torch.eye(len(g), dtype=DOUBLE))
        for a, g, for_a, for_g in zip(block.inputs, block.outputs, *shares, strict=True)
    ]


def test_a_step_is_that_of_the_dense_inverse() -> None:
    model = network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options: dict[str, Any] = {"prior_precision": 3.0, "temperature": 0.5, "damping": 0.01, "clip": None}
    posterior = KFAC(model, data_size=10, lr=0.1, random="*", **options)
    gradients = dict(zip(before, torch.autograd.grad(nll(model), list(model.parameters())), strict=True))
    terms = posterior.step(nll)
    shift = 0.5 * 3.0 / 10
    blocks = {block.names[0]: block for block in posterior.engine.blocks}
    for path, groups in (("0", 2), ("4", 1)):
        block = blocks[f"{path}.weight"]
        old, slope = (matrix_of(d[f"{path}.weight"], d[f"{path}.bias"]).chunk(groups) for d in (before, gradients))
        new = matrix_of(model[int(path)].weight, model[int(path)].bias).chunk(groups)
        for group, (a, g) in enumerate(damped(block, 0.01 + shift)):
            direction = torch.linalg.solve(dense(a, g), (slope[group] + shift * old[group]).flatten())
            torch.testing.assert_close(new[group].flatten(), old[group].flatten() - 0.1 * direction)
    for name in ("1.weight", "1.bias"):
        direction = (gradients[name] + shift * before[name]) / (blocks[name].curvature + 0.01 + shift)
        torch.testing.assert_close(model.get_parameter(name).detach(), before[name] - 0.1 * direction)
    penalty = 0.5 * 3.0 * sum(float(p.square().sum()) for p in before.values()) * 0.5 / 10
    assert terms.penalty == pytest.approx(penalty)


def test_parameters_that_are_not_random_have_no_prior() -> None:
    model = network()
    posterior = KFAC(model, data_size=10, lr=0.1, prior_precision=1e6, random=["4.*"], clip=None)
    before = model[0].weight.detach().clone()
    slope = torch.autograd.grad(nll(model), [model[0].weight, model[0].bias])
    posterior.step(nll)
    block = next(b for b in posterior.engine.blocks if b.names[0] == "0.weight")
    old = matrix_of(before, before.new_zeros(4)).chunk(2)
    for group, (a, g) in enumerate(damped(block, 1e-3)):
        direction = torch.linalg.solve(dense(a, g), matrix_of(*slope).chunk(2)[group].flatten())
        expected = old[group][:, :-1] - 0.1 * direction.view(2, -1)[:, :-1]
        torch.testing.assert_close(model[0].weight.detach().flatten(1).chunk(2)[group], expected)


def test_clipping_bounds_the_quadratic_form_of_the_step() -> None:
    def moved(clip: float | None) -> Tensor:
        model = network()
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        KFAC(model, data_size=10, lr={"0.*": 0.1, "*": 0.2}, clip=clip).step(nll)
        return torch.cat([p.detach().flatten() for p in model.parameters()]) - before

    def form(step: Tensor) -> float:
        """stepᵀ F step by the engine's own damped curvature."""
        model = network()
        engine = KFAC(model, data_size=10, lr=0.0).engine
        engine.gather(nll)
        engine.update()
        pieces = engine.split.layout.split(step)
        ordered = {name: pieces[name] for name, _ in model.named_parameters()}
        total = 0.0
        for block in engine.blocks:
            matrix = block.matrix(ordered)
            if isinstance(block, KroneckerBlock):
                inverse = [torch.linalg.inv(m) for m in (block.output_inverse, block.input_inverse)]
                total += float((matrix * (inverse[0] @ matrix @ inverse[1])).sum())
            else:
                total += float((matrix.square() / block.root.square()).sum())
        return total

    def in_layout(step: Tensor) -> Tensor:
        model = network()
        names = [name for name, _ in model.named_parameters()]
        by_name = dict(zip(names, step.split([p.numel() for p in model.parameters()]), strict=True))
        layout = KFAC(model, data_size=10).engine.split.layout
        return torch.cat([by_name[name] for name in layout.names])

    free = moved(None)
    size = form(in_layout(free))
    torch.testing.assert_close(moved(size * 2), free)
    torch.testing.assert_close(moved(size / 4), free / 2)


# -- the noise ------------------------------------------------------------------------------------------------------


def trained(**options: Any) -> NoisyKFAC:
    settings = {"data_size": 20, "prior_precision": 2.0, "temperature": 0.5, "random": "*", **options}
    posterior = NoisyKFAC(network(), **settings)
    for _ in range(3):
        posterior.step(nll)
    return posterior


def covariances(posterior: NoisyKFAC) -> dict[str, list[Tensor]]:
    """τ/N · (A' ⊗ G')⁻¹ by dense algebra, for each block and group."""
    shift = 0.5 * 2.0 / 20
    found = {}
    for block in posterior.blocks:
        if isinstance(block, KroneckerBlock):
            fisher = [dense(a, g) for a, g in damped(block, 1e-3 + shift)]
        else:
            fisher = [torch.diag((block.curvature + 1e-3 + shift).flatten())]
        found[block.names[0]] = [0.5 / 20 * torch.linalg.inv(f) for f in fisher]
    return found


def test_noise_is_a_linear_map_whose_covariance_is_the_dense_inverse() -> None:
    """M Mᵀ by unit vectors: exact, so that a wrong triangle (Lᵀ L instead of L Lᵀ) cannot hide."""
    posterior = trained()
    for block in posterior.blocks:
        units = torch.eye(block.momentum.numel(), dtype=DOUBLE).view(-1, *block.momentum.shape)
        columns = torch.stack([block.correlate(unit).flatten() for unit in units], dim=1)
        parts = covariances(posterior)[block.names[0]]
        torch.testing.assert_close(0.5 / 20 * columns @ columns.T, torch.block_diag(*parts))


def test_draws_have_the_covariance_of_the_dense_kronecker_product() -> None:
    posterior = trained()
    count = 2000
    draws, means = [posterior.draw() for _ in range(count)], posterior.mean()
    exact = torch.block_diag(*(part for parts in covariances(posterior).values() for part in parts))
    rows = torch.stack(
        [torch.cat([(b.matrix(draw) - b.matrix(means)).flatten() for b in posterior.blocks]) for draw in draws]
    )
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(exact), rows.T, upper=False)
    # Over all 79 weights: entries of a Wishart matrix have std √2/√2000 = 0.032 on and 0.022 off its diagonal; that
    # one of 3 160 is 6 std off has a chance of about 10⁻⁵.
    torch.testing.assert_close(whitened @ whitened.T / count, torch.eye(len(exact), dtype=DOUBLE), rtol=0, atol=0.19)
    assert (whitened.mean(1).abs() < 6 / math.sqrt(count)).all()


def test_std_is_the_diagonal_and_the_kl_that_of_the_dense_gaussians() -> None:
    posterior = trained()
    std, kl = posterior.std(), 0.0
    assert list(std) == list(posterior.mean()) == [name for name, _ in posterior.model.named_parameters()]
    for block in posterior.blocks:
        matrix, means = block.matrix(std), block.matrix(posterior.mean())
        parts = covariances(posterior)[block.names[0]]
        for group, exact in enumerate(parts):
            pieces = [(m[group] if len(parts) > 1 else m).flatten() for m in (matrix, means)]
            torch.testing.assert_close(pieces[0], exact.diagonal().sqrt())
            prior = D.MultivariateNormal(torch.zeros_like(pieces[1]), torch.eye(len(exact), dtype=DOUBLE) / 2)
            kl += float(D.kl_divergence(D.MultivariateNormal(pieces[1], exact), prior))
    terms = posterior.step(nll)
    assert terms.kl == pytest.approx(kl, rel=1e-6)
    assert terms.penalty == pytest.approx(0.5 / 20 * kl, rel=1e-6)


def test_a_prior_that_differs_within_a_layer_enters_its_noise_by_the_mean_and_its_pull_exactly() -> None:
    def layer() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(3, 2).double()

    x, y = normal(6, 3), torch.arange(6) % 2
    by_name = NoisyKFAC(layer(), data_size=10, prior=Gaussian({"*": 0.5}, {"weight": 2.0**-0.5, "bias": 6.0**-0.5}))
    same = NoisyKFAC(layer(), data_size=10, prior=Gaussian(0.5, 3.0**-0.5))  # (6·2 + 2·6)/8
    for posterior in (by_name, same):
        posterior.step(lambda net: F.cross_entropy(net(x), y))
    for name, std in by_name.std().items():
        torch.testing.assert_close(std, same.std()[name])
    pulls = {
        name: 0.1 * delta * (getattr(layer(), name).detach() - 0.5) for name, delta in (("weight", 2), ("bias", 6))
    }
    slopes = torch.autograd.grad(F.cross_entropy((net := layer())(x), y), list(net.parameters()))
    expected = matrix_of(slopes[0] + pulls["weight"], slopes[1] + pulls["bias"])
    torch.testing.assert_close(by_name.blocks[0].momentum[0], expected)


def test_before_the_first_step_draws_are_the_mean() -> None:
    posterior = NoisyKFAC(network(), data_size=20)
    draw, mean = posterior.draw(), posterior.mean()
    assert all(torch.equal(draw[name], mean[name]) and not posterior.std()[name].any() for name in mean)


def test_a_layer_that_is_not_used_keeps_its_prior() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    posterior = NoisyKFAC(Net().double(), data_size=20, prior_precision=4.0, damping=0.0, temperature=0.3)
    posterior.step(lambda net: F.cross_entropy(net(normal(6, 4)), torch.arange(6) % 3))
    torch.testing.assert_close(posterior.std()["unused.weight"], torch.full((2, 5), 0.5, dtype=DOUBLE))


# -- conjugate linear regression ------------------------------------------------------------------------------------

NOISE_STD, PRIOR_STD, PRIOR_MEAN, N = 0.5, 0.8, 0.3, 60


def regression() -> tuple[Tensor, Tensor]:
    x = normal(N, 3, seed=4)
    x[:, 1] = 0.5 * x[:, 0] + x[:, 1]
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=DOUBLE) + 0.4
    return x, (y + NOISE_STD * normal(N, seed=5)).unsqueeze(1)


def features() -> Tensor:
    return torch.cat([regression()[0], torch.ones(N, 1, dtype=DOUBLE)], dim=1)


def exact_mean(temperature: float) -> Tensor:
    """Mean of the tempered posterior: the likelihood to the power 1/τ."""
    x, y = features(), regression()[1][:, 0]
    precision = x.T @ x / (NOISE_STD**2 * temperature) + torch.eye(4, dtype=DOUBLE) / PRIOR_STD**2
    return torch.linalg.solve(precision, x.T @ y / (NOISE_STD**2 * temperature) + PRIOR_MEAN / PRIOR_STD**2)


def implied_covariance(temperature: float, fisher: str) -> Tensor:
    """τ/N·(A' ⊗ G')⁻¹ where G is the mean squared output gradient under this very posterior, or under the model."""
    x, y = features(), regression()[1][:, 0]
    a, shift = x.T @ x / N, temperature / PRIOR_STD**2 / N
    residual = (y - x @ exact_mean(temperature)).square()
    covariance = torch.eye(4, dtype=DOUBLE) * 0.01
    for _ in range(200):
        spread = ((x @ covariance) * x).sum(1)
        g = ((residual + spread).mean() / NOISE_STD**4 if fisher == "empirical" else 1 / NOISE_STD**2) * torch.ones(1)
        pi = (a.diagonal().mean() / g).sqrt()
        damped_a = a + pi * math.sqrt(shift) * torch.eye(4, dtype=DOUBLE)
        covariance = temperature / N * torch.linalg.inv(damped_a) / (g + math.sqrt(shift) / pi)
    return covariance


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize(("fisher", "batch"), [("empirical", N), ("sampled", N), ("empirical", 30)])
def test_conjugate_regression(temperature: float, fisher: str, batch: int) -> None:
    x, y = regression()
    torch.manual_seed(1)
    posterior = NoisyKFAC(
        nn.Linear(3, 1).double(),
        data_size=N,
        lr=0.02,
        prior=Gaussian(PRIOR_MEAN, PRIOR_STD),
        temperature=temperature,
        damping=0.0,
        clip=None,
        curvature_decay=0.98,
        fisher=fisher,
        likelihood=GaussianNoise(NOISE_STD),
    )
    generator = torch.Generator().manual_seed(0)
    means, stds, steps, order = [], [], 400, torch.arange(N)
    for step in range(steps):
        posterior.lr_scale = 0.5 * (1 + math.cos(math.pi * step / steps))
        start = step * batch % N
        order = order if start else torch.randperm(N, generator=generator)
        rows = order[start : start + batch]
        posterior.step(lambda net, rows=rows: posterior.likelihood.nll(net(x[rows]), y[rows]))
        if step >= 3 * steps // 4:
            means.append(torch.cat([posterior.mean()[n].flatten() for n in ("weight", "bias")]))
            stds.append(torch.cat([posterior.std()[n].flatten() for n in ("weight", "bias")]))
    std = implied_covariance(temperature, fisher).diagonal().sqrt()
    assert ((torch.stack(means).mean(0) - exact_mean(temperature)).abs() < 0.3 * std).all()
    assert ((torch.stack(stds).mean(0) / std - 1).abs() < 0.1).all()


def test_the_sampled_fisher_matrix_implies_nearly_the_exact_posterior() -> None:
    """What the split of the damping costs: below a tenth of each standard deviation, correlations within 0.06."""
    x = features()
    exact = torch.linalg.inv(x.T @ x / NOISE_STD**2 + torch.eye(4, dtype=DOUBLE) / PRIOR_STD**2)
    ours = implied_covariance(1.0, "sampled")
    assert ((ours.diagonal() / exact.diagonal()).sqrt() - 1).abs().max() < 0.1
    scales = [c.diagonal().sqrt() for c in (ours, exact)]
    correlations = [c / torch.outer(s, s) for c, s in zip((ours, exact), scales, strict=True)]
    torch.testing.assert_close(*correlations, rtol=0, atol=0.06)


def test_kfac_finds_the_maximum() -> None:
    x, y = regression()
    torch.manual_seed(1)
    posterior = KFAC(
        nn.Linear(3, 1).double(),
        data_size=N,
        lr=0.1,
        prior=Gaussian(PRIOR_MEAN, PRIOR_STD),
        likelihood=GaussianNoise(NOISE_STD),
        clip=None,
    )
    for _ in range(300):
        posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    found = torch.cat([posterior.model.weight.detach().flatten(), posterior.model.bias.detach()])
    torch.testing.assert_close(found, exact_mean(1.0), rtol=1e-4, atol=1e-4)
