"""Maps of class probabilities: each recovers a known distortion, is the optimum of its cost, and rises."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from credo.calibration.class_fits import (
    CLASS_FITS,
    fit_beta,
    fit_dirichlet,
    fit_isotonic,
    fit_temperature,
    fit_vector,
    isotonic,
)
from credo.core.held_out.class_maps import BetaMap, ClassMap, IsotonicMap, LinearMap, finite_logs
from credo.evaluate import temperature_scale


def drawn(truth: Callable[[Tensor], Tensor], rows: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a model, and labels drawn from what `truth` makes of them."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = (2 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)).log_softmax(-1)
    return log_probs, torch.multinomial(truth(log_probs).exp(), 1, generator=generator)[:, 0]


def nll(made: ClassMap, log_probs: Tensor, labels: Tensor) -> float:
    return float(torch.nn.functional.nll_loss(made.log_probs(log_probs), labels))


WEIGHT = torch.tensor([[0.8, 0.3, 0.0], [0.0, 0.6, 0.0], [-0.2, 0.0, 0.9]], dtype=torch.float64)
BIAS = torch.tensor([0.5, -0.5, 0.0], dtype=torch.float64)
TRUTHS: dict[str, ClassMap] = {
    "temperature": LinearMap(torch.tensor(0.5).double(), torch.tensor(0.0).double()),
    "vector": LinearMap(WEIGHT.diagonal().clone(), BIAS),
    "dirichlet": LinearMap(WEIGHT, BIAS),
    "beta": BetaMap(torch.tensor([[0.5, 1.0, 0.3], [0.7, 0.5, 0.0], [1.0, 1.5, -0.2]]).double()),
}


@pytest.mark.parametrize("kind", CLASS_FITS)
def test_each_map_recovers_a_known_distortion(kind: str) -> None:
    """Fitted on 20,000 rows, it predicts others nearly as well as the truth."""
    truth = TRUTHS.get(kind, TRUTHS["temperature"])
    classes = 2 if kind == "isotonic" else 3
    log_probs, labels = drawn(truth.log_probs, 40_000, classes)
    made = CLASS_FITS[kind](log_probs[:20_000], labels[:20_000], 4.0)
    rest = log_probs[20_000:], labels[20_000:]
    best, plain = nll(truth, *rest), float(torch.nn.functional.nll_loss(*rest))
    assert nll(made, *rest) - best < 0.06 * (plain - best)
    if isinstance(made, LinearMap) and isinstance(truth, LinearMap):
        # A matrix is determined up to what is added to a whole column of it.
        torch.testing.assert_close(_centred(made.weight), _centred(truth.weight), atol=0.06, rtol=0)


def _centred(weight: Tensor) -> Tensor:
    return weight - weight.mean(0) if weight.dim() == 2 else weight


def test_without_a_prior_the_temperature_is_that_of_temperature_scale() -> None:
    log_probs, labels = drawn(TRUTHS["temperature"].log_probs, 300, 4)
    temperature = temperature_scale(log_probs, labels).temperature
    assert float(fit_temperature(log_probs, labels, 0.0).weight) == pytest.approx(1 / temperature, rel=1e-12)
    assert float(fit_temperature(log_probs, labels, 1e-9).weight) == pytest.approx(1 / temperature, rel=1e-6)


def test_the_larger_linear_maps_contain_the_smaller_ones() -> None:
    """At the same prior, a larger family reaches a cost that is not higher; with all else forbidden, the same map."""
    log_probs, labels = drawn(TRUTHS["dirichlet"].log_probs, 200, 3)
    scalar, vector, matrix = (fit(log_probs, labels) for fit in (fit_temperature, fit_vector, fit_dirichlet))
    probs = log_probs.exp()
    for temperature in (0.3, 2.0):
        number = torch.tensor(1 / temperature).double()
        same = LinearMap(number * torch.eye(3).double(), torch.zeros(3).double())
        torch.testing.assert_close(same(probs), LinearMap(number, torch.tensor(0.0).double())(probs))
    assert _cost(matrix, log_probs, labels) <= _cost(vector, log_probs, labels) <= _cost(scalar, log_probs, labels)


def _whole(made: LinearMap, classes: int) -> tuple[Tensor, Tensor]:
    weight = made.weight if made.weight.dim() == 2 else torch.diag(made.weight.expand(classes))
    return weight, made.bias.expand(classes)


def _cost(made: LinearMap, log_probs: Tensor, labels: Tensor, prior: float = 4.0) -> float:
    weight, bias = _whole(made, log_probs.shape[1])
    diagonal, classes = weight.diagonal(), len(weight)
    off = weight - torch.diag(diagonal)
    penalty = (diagonal.mean() - 1) ** 2 + ((diagonal - diagonal.mean()) ** 2).sum() + (bias**2).sum()
    return len(labels) * nll(made, log_probs, labels) + prior / 2 * float(penalty + classes * (off**2).sum())


@pytest.mark.parametrize("kind", ["temperature", "vector", "dirichlet"])
def test_linear_maps_are_the_optimum_that_scipy_finds(kind: str) -> None:
    log_probs, labels = drawn(TRUTHS["dirichlet"].log_probs, 60, 3)
    made = CLASS_FITS[kind](log_probs, labels, 4.0)
    assert isinstance(made, LinearMap)
    size, shape = made.weight.numel(), made.weight.shape

    def cost(flat: np.ndarray) -> float:
        both = torch.from_numpy(flat)
        bias = both[size:] if made.bias.dim() else torch.tensor(0.0).double()
        return _cost(LinearMap(both[:size].reshape(shape), bias), log_probs, labels)

    start = np.concatenate([(torch.eye(3) if made.weight.dim() == 2 else torch.ones(shape)).flatten(), np.zeros(3)])
    start = start[: size + made.bias.numel() * (made.bias.dim() > 0)].astype(float)
    found = minimize(cost, start, method="BFGS", tol=1e-6)
    assert _cost(made, log_probs, labels) <= found.fun + 1e-7
    np.testing.assert_allclose(made.weight.flatten(), found.x[:size], atol=1e-3)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_beta_is_the_optimum_that_scipy_finds_with_bounds(is_reversed: bool) -> None:
    """Of labels against the probabilities, a and b are held at 0."""
    log_probs, labels = drawn(TRUTHS["beta"].log_probs, 80, 3)
    labels = (labels + 1) % 3 if is_reversed else labels
    made = fit_beta(log_probs, labels)
    logs, rest = log_probs.numpy(), np.log(-np.expm1(log_probs.numpy()))
    for k in range(3):

        def cost(x: np.ndarray, k: int = k) -> float:
            odds = x[0] * logs[:, k] - x[1] * rest[:, k] + x[2]
            prior = 2 * ((x[0] - 1) ** 2 + (x[1] - 1) ** 2 + x[2] ** 2)
            return float((np.logaddexp(0, odds) - (labels.numpy() == k) * odds).sum() + prior)

        found = minimize(cost, np.array([1.0, 1, 0]), bounds=[(0, None), (0, None), (None, None)], tol=1e-12)
        np.testing.assert_allclose(made.coefficients[k], found.x, atol=1e-3)
        assert cost(made.coefficients[k].numpy()) <= found.fun + 1e-7
    assert not is_reversed or bool((made.coefficients[:, :2] == 0).any())


def test_pooled_violators_are_those_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(200, generator=generator, dtype=torch.float64) * 50).round() / 50  # ties
    y = (torch.rand(200, generator=generator, dtype=torch.float64) < x).double()
    knots, values = isotonic(x, y)
    theirs = IsotonicRegression(out_of_bounds="clip").fit(x.numpy(), y.numpy())
    at = np.linspace(0, 1, 301)
    np.testing.assert_allclose(np.interp(at, knots, values), theirs.predict(at), atol=1e-12)


def test_an_isotonic_map_interpolates_with_its_floor() -> None:
    log_probs, labels = drawn(TRUTHS["temperature"].log_probs, 50, 3)
    made = fit_isotonic(log_probs, labels)
    probs, expected = log_probs.exp(), []
    for k in range(3):
        curve = IsotonicRegression(out_of_bounds="clip").fit(probs[:, k].numpy(), (labels == k).double().numpy())
        expected.append(50 / 51 * curve.predict(probs[:, k].numpy()) + 1 / 51 * probs[:, k].numpy())
    by_class = np.stack(expected, 1)
    np.testing.assert_allclose(made(probs), by_class / by_class.sum(1, keepdims=True), atol=1e-12)


@pytest.mark.parametrize("kind", ["temperature", "vector", "isotonic", "beta"])
def test_probabilities_of_two_classes_keep_their_order(kind: str) -> None:
    log_probs, labels = drawn(TRUTHS["temperature"].log_probs, 100, 2)
    made = CLASS_FITS[kind](log_probs, labels, 4.0)
    grid = torch.linspace(0.001, 0.999, 500, dtype=torch.float64)
    mapped = made(torch.stack([1 - grid, grid], 1))
    assert bool((mapped[:, 1].diff() > 0).all())
    torch.testing.assert_close(mapped.sum(1), torch.ones_like(grid))


@pytest.mark.parametrize("kind", CLASS_FITS)
def test_the_nll_is_finite_for_certain_predictions_and_missing_classes(kind: str) -> None:
    probs = torch.eye(3)[torch.tensor([0, 0, 1, 1, 1, 0])]
    made = CLASS_FITS[kind](finite_logs(probs), torch.tensor([0, 0, 1, 1, 1, 0]), 4.0)
    mapped = made.log_probs(finite_logs(torch.eye(3)))
    assert bool(mapped.isfinite().all())
    assert bool(made(torch.full((1, 3), torch.nan)).isnan().all())


def test_maps_that_cannot_be_applied_raise() -> None:
    one = torch.ones(2, 2, dtype=torch.float64)
    for make in (
        lambda: LinearMap(one, torch.zeros(3).double()),
        lambda: LinearMap(one * torch.nan, torch.zeros(2).double()),
        lambda: BetaMap(-torch.ones(2, 3).double()),
        lambda: IsotonicMap(one, 2 * one, torch.tensor(0.1).double()),
        lambda: IsotonicMap(one, one, torch.tensor(0.0).double()),
    ):
        with pytest.raises(ValueError):
            make()
    with pytest.raises(ValueError, match="2 classes, not 3"):
        LinearMap(one, torch.zeros(2).double()).check_classes(3)
