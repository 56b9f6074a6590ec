"""The closed-form last layer of a regression against textbook formulas."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from last_layer_small import OUTPUTS, ROWS, STDS, batches, features, inputs, made, matrix, regression
from torch.nn import functional as F

from credo.core.likelihood import GaussianNoise
from credo.priors import Gaussian

SCALES = torch.linspace(0.5, 2.0, OUTPUTS * 5).view(OUTPUTS, 5)
PRIORS: dict[str, dict[str, Any]] = {
    "one precision": {"prior_precision": 0.7},
    "by name": {"prior": Gaussian(0.3, {"2.weight": 0.5, "*": 2.0})},
    "by weight": {"prior": Gaussian(0.1, {"2.weight": SCALES, "*": 1.5})},
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("std", [0.5, STDS])
@pytest.mark.parametrize("prior", PRIORS)
def test_it_is_textbook_regression_for_every_output(bias: bool, std: float | Sequence[float], prior: str) -> None:
    """Mean, covariance, predictive variance, evidence. (vbll's outputs each get the sum of all precisions.)"""
    posterior, (x, y) = made(GaussianNoise(std), bias=bias, **PRIORS[prior]), regression()
    posterior.fit(batches(x, y))
    phi, at = features(posterior.model, x), features(posterior.model, inputs(6, seed=3))
    assert posterior.prior is not None
    ones = torch.ones(posterior.layout.size, dtype=torch.double)
    m0, s0 = (matrix(posterior.layout.split(ones * v)) for v in (posterior.prior.mean, posterior.prior.std))
    mean, stds = matrix(posterior.mean()), matrix(posterior.std())
    outputs, variances = posterior.function_moments(inputs(6, seed=3), diagonal=True)
    evidence = 0.0
    for k, noise in enumerate(torch.tensor(std, dtype=torch.double).expand(OUTPUTS)):
        covariance = torch.linalg.inv(phi.T @ phi / noise**2 + s0[k].pow(-2).diag())
        wanted = covariance @ (phi.T @ y[:, k] / noise**2 + m0[k] / s0[k] ** 2)
        torch.testing.assert_close(mean[k], wanted, rtol=0, atol=1e-6)
        torch.testing.assert_close(stds[k], covariance.diag().sqrt(), rtol=0, atol=1e-6)
        torch.testing.assert_close(outputs[:, k], at @ wanted, rtol=0, atol=1e-6)
        torch.testing.assert_close(variances[:, k], (at @ covariance * at).sum(1), rtol=0, atol=1e-6)
        joint = noise**2 * torch.eye(ROWS) + phi @ s0[k].square().diag() @ phi.T
        evidence += float(torch.distributions.MultivariateNormal(phi @ m0[k], joint).log_prob(y[:, k]))
    assert posterior.log_marginal_likelihood() == pytest.approx(evidence, abs=1e-5)


def test_draws_have_the_posteriors_covariance() -> None:
    posterior, (x, y) = made(GaussianNoise(STDS), prior=1.0), regression()
    posterior.fit(batches(x, y))
    drawn = torch.stack([matrix(draw) for draw in posterior.iter_draws(2000)])
    phi = features(posterior.model, x)
    for k, std in enumerate(STDS):
        wanted = torch.linalg.inv(phi.T @ phi / std**2 + torch.eye(6))
        scale = wanted.diag().sqrt()
        # Entries of the covariance of 2000 draws, so scaled, have standard errors of 0.032 at most.
        assert float(((drawn[:, k].T.cov() - wanted) / (scale * scale[:, None])).abs().max()) < 0.15


def test_the_covariance_of_outputs_is_diagonal_and_follows_the_noise_scale() -> None:
    posterior, (x, y) = made(GaussianNoise(STDS), prior=1.0), regression()
    posterior.fit(batches(x, y))
    outputs, covariance = posterior.function_moments(x[:2])
    torch.testing.assert_close(outputs, posterior.model(x[:2]))
    torch.testing.assert_close(covariance, posterior.function_moments(x[:2], diagonal=True)[1].diag_embed())
    posterior.noise_scale = 0.5
    torch.testing.assert_close(posterior.function_moments(x[:2])[1], 0.25 * covariance)


@pytest.mark.parametrize("std", [0.4, STDS])
def test_online_equals_batch(std: float | Sequence[float]) -> None:
    whole, online = (made(GaussianNoise(std), prior_precision=0.5) for _ in range(2))
    x, y = regression()
    whole.fit(batches(x, y))
    for row in range(10):
        online.update_(x[row : row + 1], y[row : row + 1])
    online.update_(x[10:], y[10:])
    torch.testing.assert_close(matrix(online.mean()), matrix(whole.mean()), rtol=0, atol=1e-9)
    torch.testing.assert_close(matrix(online.std()), matrix(whole.std()), rtol=0, atol=1e-9)
    assert online.log_marginal_likelihood() == pytest.approx(whole.log_marginal_likelihood(), abs=1e-6)


def test_added_data_leave_noise_and_prior_as_they_were_chosen() -> None:
    posterior, (x, y) = made(GaussianNoise()), regression()
    posterior.fit(batches(x[:20], y[:20]))
    rho, alpha = posterior.likelihood.noise_rho.clone(), posterior.gaussian.alpha.clone()
    posterior.update_(x[20:], y[20:])
    assert torch.equal(posterior.likelihood.noise_rho, rho)
    assert torch.equal(posterior.gaussian.alpha, alpha)


@pytest.mark.parametrize("outputs", [None, OUTPUTS])
def test_noise_and_prior_maximise_the_evidence(outputs: int | None) -> None:
    """Nothing on a grid of each is better."""
    posterior, (x, y) = made(GaussianNoise(outputs=outputs)), regression()
    posterior.fit(batches(x, y))
    best, alpha = posterior.log_marginal_likelihood(), posterior.gaussian.alpha
    noise = F.softplus(posterior.likelihood.noise_rho.detach().double())
    for factor in (0.03, 0.3, 0.9, 0.98, 1.02, 1.1, 3.0, 30.0):
        posterior.gaussian.alpha = alpha * factor
        assert posterior.log_marginal_likelihood() < best
        posterior.gaussian.alpha = alpha
        for k in range(noise.numel()):
            tried = noise.view(-1).clone()
            tried[k] *= factor
            posterior.likelihood.set_variance_(tried.view(noise.shape).square())
            assert posterior.log_marginal_likelihood() < best
        posterior.likelihood.set_variance_(noise.square())


def test_a_given_noise_and_prior_are_kept() -> None:
    posterior, (x, y) = made(GaussianNoise(0.4), prior_precision=3.0), regression()
    posterior.fit(batches(x, y))
    assert F.softplus(posterior.likelihood.noise_rho).item() == pytest.approx(0.4)
    assert float(posterior.gaussian.alpha) == 1.0


def test_targets_of_pure_noise_switch_the_weights_off() -> None:
    posterior, (x, _) = made(GaussianNoise()), regression()
    y = torch.randn(ROWS, OUTPUTS, generator=torch.Generator().manual_seed(5), dtype=torch.double)
    posterior.fit(batches(x, y))
    assert float(posterior.mean()["2.weight"].abs().max()) < 0.2
    assert F.softplus(posterior.likelihood.noise_rho).item() == pytest.approx(1.0, rel=0.15)
