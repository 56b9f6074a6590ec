"""Bayesian linear regression, where the posterior is known: every way to train BBB must find it."""

import math

import pytest
import torch
from torch import Tensor, nn

from credo.core.likelihood import GaussianNoise
from credo.core.prior import Gaussian
from credo.methods import BBB

NOISE_STD, PRIOR_STD, PRIOR_MEAN = 0.5, 0.8, 0.3
EXAMPLES, STEPS = 40, 700
DRAWS = {"weights": 4, "lrt": 1, "flipout": 4}  # local reparameterisation has the least gradient noise


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(EXAMPLES, 3, generator=generator, dtype=torch.float64)
    x[:, 1] = 0.7 * x[:, 0] + 0.7 * x[:, 1]  # correlated: mean-field and marginal standard deviations differ
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.4
    return x, (y + NOISE_STD * torch.randn(EXAMPLES, generator=generator, dtype=torch.float64)).unsqueeze(1)


def exact(temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Posterior mean, marginal and mean-field standard deviations of weights and bias.

    E[Σ NLL] + T·KL is T times the negative ELBO of the likelihood to the power 1/T: its precision is
    XᵀX/(s²T) + prior precision. The best factorised Gaussian has the same mean and std 1/√diag(precision).
    """
    x, y = data()
    features = torch.cat([x, torch.ones(EXAMPLES, 1, dtype=torch.float64)], dim=1)
    noise_variance = NOISE_STD**2 * temperature
    precision = features.T @ features / noise_variance + torch.eye(4, dtype=torch.float64) / PRIOR_STD**2
    target = features.T @ y[:, 0] / noise_variance + PRIOR_MEAN / PRIOR_STD**2
    mean = torch.linalg.solve(precision, target)
    return mean, torch.linalg.inv(precision).diagonal().sqrt(), precision.diagonal().rsqrt()


def fitted(noise: str, temperature: float, **options) -> tuple[Tensor, Tensor]:
    x, y = data()
    torch.manual_seed(1)
    network = nn.Linear(3, 1).double()
    posterior = BBB(
        network,
        data_size=EXAMPLES,
        prior=Gaussian(PRIOR_MEAN, PRIOR_STD),
        noise=noise,
        draws=DRAWS[noise],
        temperature=temperature,
        init=0.1,
        lr=0.05,
        likelihood=GaussianNoise(NOISE_STD),
        **options,
    )
    for step in range(STEPS):
        posterior.lr_scale = 0.5 * (1 + math.cos(math.pi * step / STEPS))
        posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    order = ("weight", "bias")
    mean, std = posterior.mean(), posterior.std()
    return torch.cat([mean[n].reshape(-1) for n in order]), torch.cat([std[n].reshape(-1) for n in order])


def check(noise: str, temperature: float, **options) -> None:
    mean, std = fitted(noise, temperature, **options)
    exact_mean, marginal_std, mean_field_std = exact(temperature)
    # Over four seeds of the noise for each case the largest deviations were 0.1 standard deviations and 7 %.
    assert ((mean - exact_mean).abs() < 0.5 * mean_field_std).all()
    assert ((std / mean_field_std - 1).abs() < 0.1).all()
    assert (mean_field_std < 0.9 * marginal_std)[:2].all()  # the data can tell the two apart


@pytest.mark.parametrize("noise", ["weights", "lrt", "flipout"])
def test_mean_and_mean_field_std_are_recovered(noise: str) -> None:
    check(noise, temperature=1.0)


@pytest.mark.parametrize("noise", ["weights", "lrt"])
def test_temperature_gives_the_tempered_posterior(noise: str) -> None:
    check(noise, temperature=0.5)
    cold, exact_std = exact(0.5)[2], exact(1.0)[2]
    assert (cold < 0.9 * exact_std).all()


def test_monte_carlo_kl_leads_to_the_same_posterior() -> None:
    check("weights", temperature=1.0, kl_term="monte-carlo")
