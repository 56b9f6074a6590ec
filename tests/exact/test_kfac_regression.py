"""Conjugate linear regression by K-FAC: the posterior that its curvature implies, and the maximum."""

import math

import pytest
import torch
from kfac_dense import DOUBLE, normal
from torch import Tensor, nn

from credo.core.likelihood import GaussianNoise
from credo.core.prior import Gaussian
from credo.methods.kfac.kfac import KFAC
from credo.methods.kfac.noisy_kfac import NoisyKFAC

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


@pytest.mark.part(2)
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
        curvature={"decay": 0.98, "fisher": fisher},
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


def ratios_to_exact(x: Tensor, precision: float, **curvature: object) -> Tensor:
    """Standard deviations over those of the exact posterior, at the mean of a regression whose residuals are ±σ.

    There the squared output gradient of every row is that of the model, 1/σ².
    """
    net = nn.Linear(x.shape[1], 1, bias=False).double()
    signs = 1.0 - 2.0 * (torch.arange(len(x)) % 2).double()
    y = net(x).detach() + NOISE_STD * signs.unsqueeze(1)
    options = {"prior_precision": precision, "temperature": 1.0, "damping": 0.0, "curvature": curvature}
    noise = GaussianNoise(NOISE_STD)
    posterior = NoisyKFAC(net, data_size=len(x), lr=1e-9, likelihood=noise, **options)  # type: ignore[arg-type]
    posterior.step(lambda net: noise.nll(net(x), y))
    exact = torch.linalg.inv(x.T @ x / NOISE_STD**2 + precision * torch.eye(x.shape[1], dtype=DOUBLE))
    return posterior.std()["weight"].flatten() / exact.diagonal().sqrt()


@pytest.mark.parametrize("precision", [0.01, 1.0, 10.0, 160.0, 1e4])
def test_the_prior_in_both_factors_makes_noise_narrower_than_the_posterior(precision: float) -> None:
    """√(1 + r²)/(1 + r) where inputs are uncorrelated: r² is the prior's precision over that of the data."""
    x = torch.linalg.qr(normal(40, 5, seed=3)).Q * math.sqrt(40)
    r = math.sqrt(precision * NOISE_STD**2 / 40)
    wanted = torch.full((5,), math.sqrt(1 + r**2) / (1 + r), dtype=DOUBLE)
    torch.testing.assert_close(ratios_to_exact(x, precision), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(ratios_to_exact(x, precision, eigenbasis=True), wanted / wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("precision", [1.0, 10.0])
def test_with_correlated_inputs_an_eigenbasis_is_exact_and_factors_are_not(precision: float) -> None:
    x = normal(40, 5, seed=3) @ normal(5, 5, seed=6)
    assert ratios_to_exact(x, precision).max() < 0.97
    torch.testing.assert_close(
        ratios_to_exact(x, precision, eigenbasis=True), torch.ones(5, dtype=DOUBLE), rtol=1e-6, atol=0
    )


def test_of_a_weak_prior_the_sampled_fisher_matrix_implies_nearly_the_exact_posterior() -> None:
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
