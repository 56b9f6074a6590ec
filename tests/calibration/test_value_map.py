"""The distribution of residuals: exact moments, quantiles and scores; recovered from samples."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from credo.calibration import recalibrate_values
from credo.calibration.value_fits import fit_quantile, fit_std_scale
from credo.core.held_out.value_map import ResidualMap
from credo.evaluate import crps_gaussian_each


def made() -> ResidualMap:
    """Two outputs; the second has one knot fewer."""
    knots = torch.tensor([[-1.0, 0.2, 1.5], [-0.5, 0.5, 0.5]], dtype=torch.float64)
    levels = torch.tensor([[0.3, 0.4, 0.8], [0.1, 0.7, 0.7]], dtype=torch.float64)
    return ResidualMap(torch.tensor([2.0, 0.5], dtype=torch.float64), knots, levels)


def test_density_quantiles_moments_and_crps_belong_to_one_distribution() -> None:
    shape = made()
    edges = [[-np.inf, -2.0, 0.4, 3.0, np.inf], [-np.inf, -0.25, 0.25, np.inf]]
    for output in range(2):

        def at(name: str, value: float, output: int = output) -> float:
            return float(getattr(shape, name)(torch.full((1, 2), value, dtype=torch.float64))[0, output])

        def integral(power: int, low: float, high: float, output: int = output) -> float:
            def value(t: float) -> float:
                return t**power * math.exp(
                    float(shape.log_density(torch.full((1, 2), t, dtype=torch.float64))[0, output])
                )

            return float(integrate.quad(value, low, high, epsabs=1e-11)[0])

        moments = [
            sum(integral(power, low, high) for low, high in zip(edges[output], edges[output][1:], strict=False))
            for power in range(3)
        ]
        assert moments[0] == pytest.approx(1, abs=1e-9)
        assert float(shape.mean[output]) == pytest.approx(moments[1], abs=1e-8)
        assert float(shape.std[output]) == pytest.approx(math.sqrt(moments[2] - moments[1] ** 2), abs=1e-8)
        for level in (0.01, 0.12, 0.35, 0.65, 0.95):
            quantile = float(shape.quantile(level)[output])
            assert at("cdf", quantile) == pytest.approx(level, abs=1e-12)
            slope = (at("cdf", quantile + 1e-6) - at("cdf", quantile - 1e-6)) / 2e-6
            assert math.exp(at("log_density", quantile)) == pytest.approx(slope, rel=1e-4)
        points = np.linspace(-25, 25, 200_001)
        whole = shape.cdf(torch.from_numpy(points)[:, None].expand(-1, 2))[:, output].numpy()
        for residual in (-3.0, 0.1, 2.5):
            slow = np.trapezoid((whole - (points >= residual)) ** 2, points)
            assert at("crps", residual) == pytest.approx(slow, abs=1e-3)


def test_without_knots_it_is_normal() -> None:
    residuals = torch.randn(20, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shape = fit_std_scale(residuals)
    scale = math.sqrt((float(residuals.square().sum()) + 4) / 24)
    assert float(shape.scale) == pytest.approx(scale)
    assert shape.is_normal
    assert float(shape.std) == pytest.approx(scale)
    torch.testing.assert_close(shape.crps(residuals)[:, 0], crps_gaussian_each(torch.zeros(20), scale, residuals[:, 0]))
    best = fit_std_scale(residuals, 0.0)
    other = [ResidualMap(best.scale * factor, best.knots, best.levels) for factor in (0.99, 1.01)]
    assert all(best.log_density(residuals).sum() > one.log_density(residuals).sum() for one in other)


def test_a_quantile_map_recovers_a_skewed_distribution() -> None:
    """Quantiles of 20,000 residuals that follow a shifted exponential distribution."""
    residuals = torch.from_numpy(stats.expon(loc=-1).rvs(20_000, random_state=0))[:, None]
    shape = fit_quantile(residuals)
    for level in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert float(shape.quantile(level)) == pytest.approx(stats.expon(loc=-1).ppf(level), abs=0.05)
    assert float(shape.mean) == pytest.approx(0.0, abs=0.03)
    assert float(shape.std) == pytest.approx(1.0, abs=0.05)
    rises = shape.cdf(torch.linspace(-3, 6, 500, dtype=torch.float64)[:, None])[:, 0].diff()
    assert bool((rises > 0).all())


def test_ties_and_few_rows_are_no_error() -> None:
    for residuals in (torch.zeros(100, 2), torch.ones(100, 1), torch.randn(3, 1), torch.tensor([[0.0], [1e9]] * 50)):
        shape = fit_quantile(residuals.double())
        assert bool(shape.log_density(residuals.double()).isfinite().all())


def test_arrays_of_several_outputs_are_chosen_and_have_intervals() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, std = torch.randn(400, 2, generator=generator), torch.ones(400, 2)
    y = mean + torch.tensor([3.0, 1.0]) * torch.randn(400, 2, generator=generator)
    found = recalibrate_values(mean, std, y)
    assert found.kind == "std-scale"
    assert found.nll_after < found.nll_before
    low, high = found.interval(mean, std, 0.9)
    inside = ((low <= y) & (y <= high)).double().mean(0)
    torch.testing.assert_close(inside, torch.full((2,), 0.9).double(), atol=0.05, rtol=0)
    assert float((high - low)[0, 0] / (high - low)[0, 1]) == pytest.approx(3.0, rel=0.15)
    flat = recalibrate_values(mean[:, 0], std[:, 0], y[:, 0], kind="std-scale")
    torch.testing.assert_close(flat.interval(mean[:, 0], std[:, 0])[0], low[:, 0])
    with pytest.raises(ValueError, match="same shape"):
        recalibrate_values(mean, std[:, :1], y)
    with pytest.raises(TypeError, match="interval"):
        found(mean)


def test_numbers_that_are_no_distribution_raise() -> None:
    shape = made()
    for change in (
        {"scale": -shape.scale},
        {"levels": shape.levels.flip(1)},
        {"knots": shape.knots[:, :2]},
        {"levels": torch.ones_like(shape.levels)},
    ):
        with pytest.raises(ValueError):
            ResidualMap(**{"scale": shape.scale, "knots": shape.knots, "levels": shape.levels, **change})
