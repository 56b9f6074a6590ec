"""Gradient noise: estimators against the slow way and known moments; the cost of a wider σ against closed forms."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.network.flat_layout import inverse_softplus
from credo.doctor.measure.gradients import crossed, gradient_noise
from credo.doctor.measure.objective import noise_pull, objective
from credo.doctor.subset import Subset, take_subset


def summary(g: Tensor) -> tuple[float, float, float, float]:
    """`crossed` of vectors g [draws, batches, size]."""
    return crossed(
        float(g.square().sum()),
        g.sum(1).square().sum(-1).tolist(),
        g.sum(0).square().sum(-1).tolist(),
        float(g.sum((0, 1)).square().sum()),
    )


def test_crossed_against_the_slow_way() -> None:
    g = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    length, signal, over_draws, over_batches = summary(g)
    pairs = [
        float(g[s, b] @ g[t, c])
        for s in range(4)
        for t in range(4)
        for b in range(3)
        for c in range(3)
        if s != t and b != c
    ]
    assert length == pytest.approx(float(g.square().sum(-1).mean()))
    assert signal == pytest.approx(sum(pairs) / len(pairs))
    assert over_draws == pytest.approx(float(g.var(0).sum(-1).mean()))
    assert over_batches == pytest.approx(float(g.var(1).sum(-1).mean()))


@pytest.mark.parametrize(("draws", "batches"), [(1, 4), (4, 1), (1, 1)])
def test_crossed_with_one_draw_or_one_batch(draws: int, batches: int) -> None:
    g = torch.randn(draws, batches, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    length, signal, over_draws, over_batches = summary(g)
    flat = g.flatten(0, 1)
    products = (flat @ flat.T)[~torch.eye(len(flat), dtype=torch.bool)]
    assert signal == pytest.approx(float(products.mean()) if len(flat) > 1 else length)
    assert over_draws == pytest.approx(float(g.var(0).sum(-1).mean()) if draws > 1 else 0.0)
    assert over_batches == pytest.approx(float(g.var(1).sum(-1).mean()) if batches > 1 else 0.0)


def test_crossed_has_no_bias() -> None:
    """Vectors with a known mean, draw effect (variance 4 per entry), batch effect (1) and rest (0.25), 3 entries.

    The mean of 4,000 estimates is within five standard errors: a false alarm in about 400,000 runs.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    found = []
    for _ in range(4000):
        g = 1.5 + 2 * normal(3, 1, 3) + normal(1, 4, 3) + 0.5 * normal(3, 4, 3)
        found.append(summary(g))
    estimates = torch.tensor(found, dtype=torch.float64)
    wanted = torch.tensor([3 * (2.25 + 5.25), 3 * 2.25, 3 * 4.25, 3 * 1.25], dtype=torch.float64)
    error = estimates.std(0) / math.sqrt(len(found))
    assert bool(((estimates.mean(0) - wanted).abs() < 5 * error).all())


def linear_problem(std: float, noise: float = 0.5) -> tuple[credo.BBB, Subset]:
    """Bayesian linear regression on 64 examples with 3 inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + noise * torch.randn(64, 1, generator=generator)
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.9, -1.8, 0.4]]))
    posterior = credo.BBB(
        model, data_size=64, prior=0.8, likelihood=credo.GaussianNoise(noise), init=std, temperature=0.5
    )
    return posterior, Subset(x, y, examples=64, batches=1, batch_size=64)


def test_gradients_of_a_linear_model_in_closed_form() -> None:
    """∇ = Xᵀ(Xw − y)/(B·noise²): over draws its covariance is H σ² H with H = XᵀX/(B·noise²).

    200 draws: the estimated variance has a relative standard error of about 10 %, the tolerance is four times that.
    """
    posterior, sample = linear_problem(0.1)
    batch = Subset(sample.x, sample.y, examples=64, batches=2, batch_size=32)
    found = gradient_noise(posterior, batch, batches=2, draws=200)
    assert (found.batches, found.draws, found.batch_size) == (2, 200, 32)
    hessians = [x.T @ x / len(x) / 0.25 for x, _ in batch.split()]
    wanted = sum(float(0.01 * h.square().sum()) for h in hessians) / 2
    assert found.draw_variance == pytest.approx(wanted, rel=0.4)
    weight = posterior.model.weight.detach().clone()[0]
    gradients = [h @ weight - x.T @ y[:, 0] / len(x) / 0.25 for h, (x, y) in zip(hessians, batch.split(), strict=True)]
    # Two batches: the unbiased ‖E g‖² is the product of their means.
    assert found.signal == pytest.approx(float(gradients[0] @ gradients[1]), rel=0.2)


def test_the_cost_of_a_wider_std_in_closed_form() -> None:
    """For a quadratic NLL d/dt E nll = Σ h_i σ_i² exactly; estimated from 200 draws to about 6 % (tolerance 25 %)."""
    posterior, sample = linear_problem(0.1)
    cost = gradient_noise(posterior, sample, draws=200).cost
    # One example's curvature: Σ over the batch of x²/noise² divided by its size; half the sample is one batch.
    h = torch.stack([x.square().mean(0) for x, _ in sample.split(32)]).mean(0) / 0.25
    assert cost == pytest.approx(float((0.01 * h).sum()), rel=0.25)


def test_a_tiny_std_is_measured_as_well() -> None:
    """Far from the optimum the slope is thousands of times the cost, but cancels with the mirror image.

    What is left is a quadratic form of three normals, averaged over 16 draws: known to a factor of 3.
    """
    posterior, sample = linear_problem(1e-4)
    with torch.no_grad():
        posterior.model.weight.zero_()
    cost = gradient_noise(posterior, sample, draws=16).cost
    wanted = float((1e-8 * sample.x.square().mean(0) / 0.25).sum())
    assert cost is not None
    assert wanted / 3 < cost < 3 * wanted


def test_cost_and_pull_are_equal_at_the_optimum() -> None:
    """The mean-field optimum of linear regression is known: 1/σ² = N·h/temperature + 1/s². There the balance is 1.

    From 200 draws to about 6 % (tolerance 25 %); at three times that σ it is far above 1, at a third far below.
    """
    posterior, sample = linear_problem(0.1)
    h = sample.x.square().mean(0) / 0.25
    best = (64 * h / 0.5 + 1 / 0.64).rsqrt()

    def balance(std: Tensor) -> float:
        with torch.no_grad():
            posterior.rho.copy_(inverse_softplus(std))
        cost = gradient_noise(posterior, sample, draws=200).cost
        found = objective(posterior, nll=0.0, cost=cost, examples=64, batches=1, steps=0)
        assert found.noise_balance is not None
        return found.noise_balance

    assert balance(best) == pytest.approx(1, rel=0.25)
    assert balance(3 * best) > 5
    assert balance(best / 3) < 0.2


def test_pull_in_closed_form_and_by_finite_differences() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    gaussian = credo.BBB(model, data_size=5, prior=0.5, init=0.2)
    assert noise_pull(gaussian) == pytest.approx(15 * (1 - 0.16), rel=1e-5)
    laplace = credo.BBB(model, data_size=5, prior=credo.priors.Laplace(b=0.5), init=0.2)
    flat = laplace.layout.flatten(laplace.mean()).double()
    std, step = torch.full_like(flat, 0.2), 1e-5
    difference = laplace.prior.kl(flat, (1 + step) * std) - laplace.prior.kl(flat, (1 - step) * std)
    assert noise_pull(laplace) == pytest.approx(-float(difference) / (2 * step), rel=1e-4)


def test_a_point_estimate_varies_over_batches_only(trained: Callable[..., Any], loaders: Any) -> None:
    posterior = trained("map", "mlp")
    sample = take_subset(loaders("mlp")[0], most=500)
    found = gradient_noise(posterior, sample)
    assert (found.draws, found.draw_variance, found.cost) == (1, 0.0, None)
    gradients = []
    for x, y in sample.split()[:4]:
        loss = F.cross_entropy(posterior.model(x), y)
        pieces = torch.autograd.grad(loss, list(posterior.model.parameters()))
        gradients.append(torch.cat([piece.flatten() for piece in pieces]).double())
    stacked = torch.stack(gradients)
    assert found.batch_variance == pytest.approx(float(stacked.var(0).sum()), rel=1e-3)


def test_more_noise_in_the_weights_is_seen(trained: Callable[..., Any], loaders: Any) -> None:
    sample = take_subset(loaders("mlp")[0], most=500)
    shares = []
    for std in (0.02, 0.1):
        found = gradient_noise(trained("bbb", "mlp", init=std), sample)
        shares.append(found.draw_variance / found.batch_variance)
    assert shares[0] < shares[1]


def test_dropout_and_mixtures_have_gradients(trained: Callable[..., Any], loaders: Any) -> None:
    sample = take_subset(loaders("mlp")[0], most=300)
    dropout = gradient_noise(trained("dropout", "mlp"), sample)
    assert dropout.draw_variance > 0
    assert dropout.cost is None
    ensemble = trained("ensemble-bbb", "mlp")
    found = gradient_noise(ensemble, sample)
    members = [gradient_noise(member, sample).draw_variance for member in ensemble.parts]
    # Other draws than those of a member alone: within a factor of two of their mean.
    assert 0.5 < found.draw_variance / (sum(members) / 2) < 2
    assert found.cost is not None
