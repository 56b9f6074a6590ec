"""The distribution of a regression's targets against the mixture of draws by scipy, entry by entry."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from torch import Tensor, nn

import credo
from credo.core.held_out.calibration import Calibration
from credo.core.likelihood import MIN_STD
from credo.evaluate.predictive import coverage_of
from credo.predict.draw_loop import make_moments
from credo.predict.kinds.target_distribution import NormalMixture

DRAWS, ROWS, TARGETS = 7, 9, 2
LEVELS = (1e-4, 0.05, 0.3, 0.5, 0.9, 0.999)
Array = np.ndarray[Any, Any]
Network = Callable[..., nn.Module]


def drawn(seed: int = 1, *, columns: int = TARGETS, draws: int = DRAWS) -> Tensor:
    return torch.randn(draws, ROWS, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def distribution_function(means: Array, stds: Array, y: float) -> float:
    return float(stats.norm.cdf(y, means, stds).mean())


def quantile(means: Array, stds: Array, level: float) -> float:
    ends = stats.norm.ppf(level, means, stds)
    low, high = ends.min() - 1e-9, ends.max() + 1e-9
    return float(optimize.brentq(lambda y: distribution_function(means, stds, y) - level, low, high, xtol=1e-13))


def crps(means: Array, stds: Array, y: float) -> float:
    """∫ (F − 1{· ≥ y})², piece by piece between the components' bulks."""
    knots = np.unique(np.concatenate([means + k * stds for k in (-12, -6, -3, -1, 0, 1, 3, 6, 12)] + [[y]]))
    total = 0.0
    for low, high in zip(knots, knots[1:], strict=False):
        above = float(low >= y)
        total += integrate.quad(lambda t, a=above: (distribution_function(means, stds, t) - a) ** 2, low, high)[0]
    return total


def check(found: credo.RegressionPrediction, means: Tensor, stds: Tensor, y: Tensor, tolerance: float = 1e-9) -> None:
    """All that a prediction says of targets, against means and standard deviations [draws, rows, targets]."""
    probabilities, scores = np.empty(y.shape), np.empty(y.shape)
    ends = {level: np.empty(y.shape) for level in LEVELS}
    for row, column in np.ndindex(*y.shape):
        parts = means[:, row, column].numpy(), stds[:, row, column].numpy()
        keep = ~np.isnan(parts[0])
        parts = parts[0][keep], parts[1][keep]
        probabilities[row, column] = distribution_function(*parts, float(y[row, column]))
        scores[row, column] = crps(*parts, float(y[row, column]))
        for level in LEVELS:
            ends[level][row, column] = quantile(*parts, level)

    def close(actual: Tensor, expected: Array, near: float = tolerance) -> None:
        torch.testing.assert_close(actual.double(), torch.from_numpy(expected), rtol=near, atol=near)

    close(found.cdf(y), probabilities)
    assert found.targets is not None
    close(found.pit(), probabilities)
    close(found.crps(), scores.mean(1), max(tolerance, 1e-7))
    for level in LEVELS:
        close(found.quantile(level), ends[level], max(tolerance, 1e-8))
    low, high = found.interval(0.6)
    close(found.cdf(low), np.full(y.shape, 0.2), max(tolerance, 1e-8))
    close(found.cdf(high), np.full(y.shape, 0.8), max(tolerance, 1e-8))
    inside = np.abs(2 * probabilities - 1) <= 0.8
    assert coverage_of(found, (0.8,))[0.8] == pytest.approx(inside.mean())
    off = credo.evaluate.miscalibration_area(torch.from_numpy(probabilities))
    measured = credo.measure(found, intervals=False)
    assert measured["crps"] == pytest.approx(scores.mean(), rel=max(tolerance, 1e-7))
    assert measured["miscalibration_area"] == pytest.approx(off, abs=tolerance)


def moments_of(likelihood: Any, outputs: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    mean, std = likelihood.moments(outputs)
    return mean.detach(), factor * std.detach().expand_as(mean)


def test_the_repro_two_networks_that_are_both_right() -> None:
    """y = ±1 + 0.1ε under the model itself: CRPS E|X − y| − ½E|X − X′|, uniform PIT, nominal coverage."""

    def constant(value: float) -> nn.Module:
        layer = nn.Linear(1, 1)
        layer.weight.data.zero_()
        layer.bias.data.fill_(value)
        return layer

    generator = torch.Generator().manual_seed(0)
    y = torch.sign(torch.rand(2000, 1, generator=generator) - 0.5) + 0.1 * torch.randn(2000, 1, generator=generator)
    noise = {"kind": "gaussian", "std": 0.1}
    members = [credo.MAP(constant(value), data_size=2000, likelihood=noise) for value in (-1.0, 1.0)]
    found = credo.measure(credo.predict(credo.Ensemble(members), [(torch.zeros(2000, 1), y)]), intervals=False)
    # A(0, 2σ²)/4 + A(2, 2σ²)/4, with σ = 0.1: half of the mean distance of two targets.
    assert found["crps"] == pytest.approx((2 * 0.1 / math.sqrt(math.pi) + 2) / 4, abs=0.01)
    assert found["miscalibration_area"] < 0.02
    for level in (0.5, 0.8, 0.9, 0.95):
        assert found["interval_coverage"][f"{level:g}"] == pytest.approx(level, abs=0.025)


@pytest.mark.parametrize("std", [0.02, 0.3, (0.5, 2.0), None])
@pytest.mark.parametrize("factor", [1.0, 1.7])
def test_a_mixture_of_draws(std: Any, factor: float) -> None:
    likelihood = credo.GaussianNoise(heteroscedastic=True) if std is None else credo.GaussianNoise(std)
    outputs, y = drawn(columns=4 if std is None else 2), drawn(2)[0]
    found = make_moments([likelihood], outputs, y, calibration=Calibration(std_factor=factor)).result()
    assert (found.stds is None) == (std is not None)
    check(found, *moments_of(likelihood, outputs, factor), y)
