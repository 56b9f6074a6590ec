"""Priors against torch.distributions, quadrature and independent Monte Carlo."""

import math

import pytest
import torch
from scipy import integrate
from torch import distributions as D
from torch import nn

from credo.core.network.flat_layout import Layout
from credo.core.prior import Gaussian, Laplace, Prior, ScaleMixture
from credo.methods import BBB

SHAPES = {"0.weight": (3, 2), "0.bias": (3,), "1.weight": (1, 3), "1.bias": (1,)}
SIZE = 13


def layout() -> Layout:
    return Layout({name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()})


def bound(prior: Prior) -> Prior:
    return prior.bind(layout(), data_size=10, device=torch.device("cpu"))


def posterior_moments() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    return mean, torch.rand(SIZE, generator=generator, dtype=torch.float64) + 0.01


def by_layer(first: float, second: float) -> torch.Tensor:
    return torch.tensor([first] * 9 + [second] * 4, dtype=torch.float64)


def named(values: torch.Tensor) -> dict[str, torch.Tensor]:
    return layout().split(values)


VECTOR = torch.linspace(0.2, 3.0, SIZE, dtype=torch.float64)
LOCATED = {
    "scalar": ({"scale": 0.3}, 0.0, 0.3),
    "scalar with a mean": ({"mean": -0.7, "scale": 0.3}, -0.7, 0.3),
    "scale by glob": ({"scale": {"0.*": 0.3, "*": 2.0}}, 0.0, by_layer(0.3, 2.0)),
    "first glob wins": ({"scale": {"0.weight": 0.3, "*.weight": 5.0, "*": 0.3, "1.*": 9.0}}, 0.0, None),
    "scale by name": ({"scale": named(VECTOR)}, 0.0, VECTOR),
    "mean by name": ({"mean": named(VECTOR), "scale": 0.3}, VECTOR, 0.3),
    "both by name": ({"mean": {"*": 1.0}, "scale": {"0.*": 0.3, "1.*": named(VECTOR)["0.bias"][0]}}, 1.0, None),
    "scale vector": ({"scale": VECTOR}, 0.0, VECTOR),
    "mean vector": ({"mean": VECTOR, "scale": 0.3}, VECTOR, 0.3),
    "both vectors": ({"mean": VECTOR - 1, "scale": VECTOR}, VECTOR - 1, VECTOR),
}
EXPECTED_SCALE = {
    "first glob wins": torch.tensor([0.3] * 9 + [5.0] * 3 + [0.3], dtype=torch.float64),
    "both by name": by_layer(0.3, float(VECTOR[6])),
}


def located(case: str, family: type) -> tuple[Prior, D.Distribution]:
    given, mean, scale = LOCATED[case]
    scale = EXPECTED_SCALE.get(case, scale)
    mean, scale = (torch.as_tensor(v, dtype=torch.float64).expand(SIZE) for v in (mean, scale))
    prior = family(given.get("mean", 0.0), given["scale"])
    reference = D.Normal(mean, scale) if family is Gaussian else D.Laplace(mean, scale)
    return bound(prior), reference


@pytest.mark.parametrize("family", [Gaussian, Laplace])
@pytest.mark.parametrize("case", LOCATED)
def test_kl_and_log_prob_equal_torch_distributions(case: str, family: type) -> None:
    prior, reference = located(case, family)
    mean, std = posterior_moments()
    expected = D.kl_divergence(D.Normal(mean, std), reference).sum()
    torch.testing.assert_close(prior.kl(mean, std), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(prior.log_prob(mean), reference.log_prob(mean).sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("family", [Gaussian, Laplace])
def test_std_is_the_standard_deviation_of_the_prior(family: type) -> None:
    reference = D.Normal(0.0, 0.3) if family is Gaussian else D.Laplace(0.0, 0.3)
    assert family(0.0, 0.3).std == pytest.approx(float(reference.stddev), rel=1e-6)


def test_laplace_kl_equals_a_million_draws() -> None:
    mean, std = torch.tensor([0.4]), torch.tensor([0.7])
    q, p = D.Normal(mean.double(), std.double()), D.Laplace(torch.tensor([-0.2]).double(), torch.tensor([0.3]).double())
    torch.manual_seed(0)
    w = q.sample((1_000_000,))
    ratio = q.log_prob(w) - p.log_prob(w)
    # Five standard errors: false alarms 6e-7.
    exact = float(Laplace(-0.2, 0.3).kl(mean.double(), std.double()))
    assert abs(exact - float(ratio.mean())) < 5 * float(ratio.std()) / 1000


@pytest.mark.parametrize("z", [0.0, 1e-3, 1.0, 40.0])
def test_laplace_kl_far_from_and_at_its_kink_has_finite_gradients(z: float) -> None:
    mean, std = torch.tensor([z * 0.01], requires_grad=True), torch.tensor([0.01], requires_grad=True)
    Laplace(0.0, 0.1).kl(mean, std).backward()
    assert torch.isfinite(mean.grad).all()
    assert torch.isfinite(std.grad).all()


def mixture(pi: float, std1: float, std2: float) -> D.MixtureSameFamily:
    weights = torch.tensor([pi, 1 - pi], dtype=torch.float64)
    stds = torch.tensor([std1, std2], dtype=torch.float64)
    return D.MixtureSameFamily(D.Categorical(weights), D.Normal(torch.zeros(2, dtype=torch.float64), stds))


@pytest.mark.parametrize(
    ("pi", "std1", "std2"), [(0.5, math.exp(-1), math.exp(-7)), (0.25, 1.0, 0.05), (0.9, 0.2, 2.0)]
)
def test_scale_mixture_log_prob_equals_torch_distributions(pi: float, std1: float, std2: float) -> None:
    w = torch.linspace(-1.5, 1.5, 301, dtype=torch.float64)
    prior, reference = ScaleMixture(pi, std1, std2), mixture(pi, std1, std2)
    torch.testing.assert_close(prior.log_prob(w), reference.log_prob(w).sum(), rtol=1e-11, atol=0)
    assert prior.std == pytest.approx(float(reference.stddev), rel=1e-12)


def test_scale_mixture_neither_underflows_nor_loses_its_gradient_far_out() -> None:
    prior = ScaleMixture()  # std2 = e^-7: at w = 1 the narrow density is e^-600000
    for value in (0.0, 1e-20, 1e-3, 1.0, 10.0, 1e3, 1e6):
        w = torch.tensor([value], requires_grad=True)
        log_prob = prior.log_prob(w)
        log_prob.backward()
        assert torch.isfinite(log_prob)
        assert torch.isfinite(w.grad).all()
        if value >= 1:  # only the wide component is left
            wide = math.log(0.5) + float(D.Normal(0.0, math.exp(-1)).log_prob(torch.tensor(value, dtype=torch.float64)))
            assert float(log_prob.detach()) == pytest.approx(wide, rel=1e-5)
            assert float(w.grad) == pytest.approx(-value / math.exp(-2), rel=1e-5)


@pytest.mark.parametrize("prior", [ScaleMixture(), ScaleMixture(0.25, 1.0, 0.05), ScaleMixture(0.9, 0.2, 2.0)])
def test_scale_mixture_gradient_equals_automatic_differentiation_and_survives_single_precision(prior) -> None:
    # From the spike's centre through where the two components are equally likely to far out.
    w = torch.cat([torch.linspace(-2, 2, 81), torch.linspace(-0.01, 0.01, 201)]).double().requires_grad_()
    reference = mixture(prior.pi, prior.std1, prior.std2)
    (expected,) = torch.autograd.grad(reference.log_prob(w).sum(), w)
    (gradient,) = torch.autograd.grad(3 * prior.log_prob(w), w)
    torch.testing.assert_close(gradient, 3 * expected, rtol=1e-9, atol=1e-12)
    single = w.detach().float().requires_grad_()
    prior.log_prob(single).backward()
    (at_single,) = torch.autograd.grad(reference.log_prob(single.double()).sum(), single)
    torch.testing.assert_close(single.grad, at_single, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [Gaussian, Laplace])
@pytest.mark.parametrize("case", ["scalar with a mean", "both vectors"])
def test_gradients_of_the_closed_forms_equal_torch_distributions(case: str, family: type) -> None:
    prior, reference = located(case, family)
    mean, std = (value.requires_grad_() for value in posterior_moments())
    for ours, theirs in (
        (prior.kl(mean, std), D.kl_divergence(D.Normal(mean, std), reference).sum()),
        (prior.log_prob(mean + std), reference.log_prob(mean + std).sum()),
    ):
        got = torch.autograd.grad(0.3 * ours, (mean, std))
        expected = torch.autograd.grad(0.3 * theirs, (mean, std))
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def kl_by_quadrature(mu: float, sigma: float, log_prior) -> float:
    q = D.Normal(torch.tensor(mu, dtype=torch.float64), torch.tensor(sigma, dtype=torch.float64))

    def integrand(w: float) -> float:
        log_q = q.log_prob(torch.tensor(w, dtype=torch.float64))
        return float(log_q.exp() * (log_q - log_prior(torch.tensor([w], dtype=torch.float64)).sum()))

    lowest, highest = mu - 10 * sigma, mu + 10 * sigma
    spike = [v for v in (-0.01, -0.003, 0.0, 0.003, 0.01) if lowest < v < highest]
    value, _ = integrate.quad(integrand, lowest, highest, points=spike, limit=200, epsabs=1e-8)
    return value


@pytest.mark.parametrize("prior", [Gaussian(0.1, 0.3), Laplace(0.1, 0.3)])
def test_closed_forms_equal_quadrature(prior: Prior) -> None:
    exact = prior.kl(torch.tensor([0.05], dtype=torch.float64), torch.tensor([0.02], dtype=torch.float64))
    assert float(exact) == pytest.approx(kl_by_quadrature(0.05, 0.02, prior.log_prob), abs=1e-6)


@pytest.mark.parametrize(("mu", "sigma"), [(0.0, 0.05), (0.003, 0.002), (0.3, 0.1)])
def test_scale_mixture_monte_carlo_kl_equals_quadrature_and_an_independent_estimate(mu: float, sigma: float) -> None:
    # A million weights with one and the same posterior: their summed one-draw estimate is a million-draw estimate.
    network = nn.Linear(1000, 1000, bias=False)
    nn.init.constant_(network.weight, mu)
    posterior = BBB(network, data_size=1, prior=ScaleMixture(), init=sigma)
    estimate = posterior.kl().item() / 1e6
    q, p = D.Normal(*torch.tensor([mu, sigma], dtype=torch.float64)), mixture(0.5, math.exp(-1), math.exp(-7))
    torch.manual_seed(1)
    w = q.sample((1_000_000,))
    ratio = q.log_prob(w) - p.log_prob(w)
    error = float(ratio.std()) / 1000
    # Five standard errors each (√2 of them for two estimates): false alarms 1e-6 a case.
    assert abs(estimate - float(ratio.mean())) < 5 * math.sqrt(2) * error
    assert abs(estimate - kl_by_quadrature(mu, sigma, p.log_prob)) < 5 * error
