"""The distribution of a regression's targets against the mixture of draws by scipy, entry by entry."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.held_out.calibration import Calibration
from credo.evaluate.predictive import coverage_of
from credo.predict.draw_loop import make_moments
from credo.predict.kinds import target_distribution
from credo.predict.kinds.target_distribution import NormalMixture
from credo.predict.result import concatenate, rescaled

DRAWS, ROWS, TARGETS = 7, 5, 2
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
    """∫ (F − 1{· ≥ y})² by 24 points in each piece between the components' bulks."""
    knots = np.unique(np.concatenate([means + k * stds for k in (-12, -6, -3, -1, 0, 1, 3, 6, 12)] + [[y]]))
    nodes, weights = np.polynomial.legendre.leggauss(24)
    middles, halves = (knots[1:] + knots[:-1]) / 2, np.diff(knots) / 2
    at = middles[:, None] + halves[:, None] * nodes
    found = stats.norm.cdf(at[..., None], means, stds).mean(-1) - (at >= y)
    return float((found**2 * weights * halves[:, None]).sum())


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
    return mean.detach(), factor * std.detach().double().expand_as(mean)


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


def test_members_with_noises_of_their_own() -> None:
    likelihoods, y = [credo.GaussianNoise(std) for std in (0.1, 0.9)], drawn(2)[0]
    outputs = drawn(draws=6)
    found = make_moments(likelihoods, outputs, y).result()
    stds = torch.tensor([0.1, 0.9] * 3, dtype=torch.float32).double().view(6, 1, 1).expand(6, ROWS, TARGETS)
    check(found, outputs, stds, y, 1e-6)
    same = make_moments([credo.GaussianNoise(0.1)] * 2, outputs, y).result()
    assert same.stds is None
    check(same, outputs, torch.full_like(stds, 0.1), y, 1e-6)


@pytest.mark.parametrize("heteroscedastic", [False, True])
def test_rows_with_fewer_draws(heteroscedastic: bool) -> None:
    likelihood = credo.GaussianNoise(heteroscedastic=True) if heteroscedastic else credo.GaussianNoise(0.3)
    outputs, y = drawn(columns=4 if heteroscedastic else 2), drawn(2)[0]
    moments = make_moments([likelihood], outputs[:3], y)
    rows = torch.tensor([1, 4])
    moments.add(outputs[3:, rows], rows)
    means, stds = (each.clone() for each in moments_of(likelihood, outputs))
    means[3:, [0, 2, 3]] = torch.nan
    check(moments.result(), means, stds, y)


def test_batches_with_other_numbers_of_draws_and_other_units() -> None:
    """Batches below each other, in units where the targets lie far from zero."""
    likelihood, y = credo.GaussianNoise(heteroscedastic=True), drawn(2)[0]
    outputs = [drawn(seed, columns=4, draws=draws) for seed, draws in ((3, 4), (4, 6))]
    whole = concatenate([make_moments([likelihood], each, y).result() for each in outputs])
    pairs = [moments_of(likelihood, each) for each in outputs]
    means, stds = (
        torch.cat([F.pad(pair[side], (0, 0, 0, 0, 0, 6 - len(pair[side])), value=torch.nan) for pair in pairs], 1)
        for side in (0, 1)
    )
    check(whole, means, stds, torch.cat([y, y]))
    shift, scale = torch.tensor([1e6, -3e5]).double(), torch.tensor([2.0, 0.5]).double()
    found = rescaled(whole, shift, scale)
    y = torch.cat([y, y]) * scale
    near = replace(found, mean=found.mean - shift, targets=y)  # where brute force has all its digits
    check(near, means * scale, stds * scale, y)
    torch.testing.assert_close(found.quantile(0.3) - shift, near.quantile(0.3), atol=1e-8, rtol=0)
    torch.testing.assert_close(found.crps(), near.crps(), atol=1e-8, rtol=0)


def test_outputs_in_float32_that_lie_far_from_zero() -> None:
    """Offsets are relative to the rounded mean: nothing is lost by it."""
    outputs, y = 1e5 + drawn().float(), 1e5 + drawn(2)[0].float()
    found = make_moments([credo.GaussianNoise(0.25)], outputs, y).result()
    means = outputs.double()
    check(replace(found, mean=found.mean.double()), means, torch.full_like(means, 0.25), y.double(), 1e-6)


def test_narrow_components_far_apart() -> None:
    """Where Newton's method alone fails: plateaus of the distribution function, and levels on their edges."""
    means = torch.tensor([-1e3, 0.0, 1.0, 1e6]).double().view(4, 1, 1)
    found = make_moments([credo.GaussianNoise(1e-3)], means, torch.zeros(1, 1).double()).result()
    std = float(found.aleatoric)
    for level, expected in ((0.125, -1e3), (0.375, 0.0), (0.625, 1.0), (0.875, 1e6)):
        assert float(found.quantile(level)) == pytest.approx(expected, abs=1e-7)
    assert float(found.quantile(0.2)) == pytest.approx(-1e3 + std * stats.norm.ppf(0.8), abs=1e-7)
    assert -1e3 < float(found.quantile(0.25)) < 0  # anywhere between them
    distances = np.abs(means.flatten().numpy() - means.numpy().reshape(-1, 1))
    assert float(found.crps()) == pytest.approx((1e3 + 1 + 1e6) / 4 - distances.mean() / 2, rel=1e-6)


def test_marked_rows_have_no_distribution(mlp: Network) -> None:
    posterior = credo.BBB(mlp(3, 1), data_size=10, likelihood=credo.GaussianNoise(0.3), init=0.4)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    x[2] = torch.inf
    found = credo.predict(posterior, [(x, torch.zeros(4, 1))], draws=5, on_nonfinite="mark")
    for value in (found.cdf(torch.zeros(4, 1)), found.quantile(0.3), found.crps(), *found.interval(0.5)):
        assert value.isnan().reshape(4).tolist() == [False, False, True, False]


@pytest.mark.parametrize("way", ["batches", "tolerance", "shard", "predictor", "calibrated", "activation"])
def test_predictions_hold_what_their_draws_say(way: str, mlp: Network) -> None:
    """`predict` in all its ways: the means are the outputs of the draws, and all numbers are those of their mixture."""
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0)).double()
    x, y = 3 * x, drawn(2)[0]
    posterior = credo.BBB(mlp(3, 2).double(), data_size=10, likelihood=credo.GaussianNoise(0.3), init=0.4)
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    options: dict[str, Any] = {"draws": 12, "seed": 3, "shared_draws": True, "strategy": "loop"}
    std = 0.3
    if way == "tolerance":
        options |= {"tolerance": 0.15, "draws": 30}
        posterior.likelihood.noise_rho.data.fill_(math.log(math.expm1(std := 2.0)))
    elif way == "shard":
        options |= {"shard": "draws"}
    elif way == "activation":
        options |= {"strategy": "activation", "shared_draws": False}
    elif way == "calibrated":
        posterior.calibration = Calibration(noise_scale=0.5, std_factor=2.0)
        std = 0.6
    if way == "predictor":
        found = credo.predictor(posterior, draws=12, seed=3)(batches)
    else:
        found = credo.predict(posterior, batches, **options)
    assert found.offsets is not None
    means = (found.mean.unsqueeze(1) + found.offsets).transpose(0, 1)
    count = found.draws_used
    assert (~means.isnan()).sum(0).tolist() == count.unsqueeze(1).expand(-1, 2).tolist()
    if way == "tolerance":
        assert 10 == int(count.min()) < int(count.max())
    torch.testing.assert_close(means.nanmean(0), found.mean)
    spread = (means - found.mean).square().nanmean(0).sqrt()  # with 1/S
    torch.testing.assert_close(spread, found.epistemic)
    check(found, means, torch.full_like(means, std), y, 1e-6)
    joint = torch.from_numpy(stats.norm.logpdf(y.numpy(), means.numpy(), std)).sum(-1)
    expected = joint.nan_to_num(nan=-torch.inf).logsumexp(0) - count.log()
    torch.testing.assert_close(found.log_likelihood, expected, atol=1e-5, rtol=1e-5)


def laplace(seed: int, x: Tensor, y: Tensor) -> credo.Laplace:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    posterior = credo.Laplace(net, data_size=len(x), likelihood=credo.GaussianNoise(0.3), prior_precision=3.0)
    posterior.fit([(x, y)], progress=False)
    return posterior


def test_closed_forms_are_normal_and_those_of_several_parts_a_mixture() -> None:
    x, y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).double(), drawn(2, draws=20)[:, 0]
    parts = [laplace(seed, x, y) for seed in (0, 1)]
    alone = [credo.predict(part, [(x, y)]) for part in parts]
    for found in alone:
        assert found.offsets is None
        check(found, found.mean.unsqueeze(0), found.total.unsqueeze(0), y)
    both = credo.predict(credo.Ensemble(parts), [(x, y)])
    means, stds = (torch.stack([getattr(found, name) for found in alone]) for name in ("mean", "total"))
    check(both, means, stds, y)


def test_one_network_is_normal(mlp: Network) -> None:
    posterior = credo.MAP(mlp(3, 2).double(), data_size=10, likelihood=credo.GaussianNoise(0.3))
    x, y = torch.randn(ROWS, 3).double(), drawn(2)[0]
    found = credo.predict(posterior, [(x, y)])
    assert found.offsets is None
    check(found, found.mean.unsqueeze(0), found.total.unsqueeze(0), y)


def test_recalibration_takes_the_place_of_the_mixture(mlp: Network) -> None:
    """Density, distribution function, quantiles and CRPS afterwards are those of one distribution."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator)
    y = x[:, :1].sin() + 0.2 * torch.rand(400, 1, generator=generator).log()
    for kind in ("std-scale", "quantile"):
        posterior = credo.BBB(mlp(3, 1), data_size=10, likelihood=credo.GaussianNoise(0.9), init=0.1)
        credo.recalibrate(posterior, [(x, y)], kind=kind, progress=False)
        found = credo.predict(posterior, [(x, y)])
        assert found.offsets is None
        assert (found.residuals is None) == (kind == "std-scale")
        step = 1e-4
        slope = (found.cdf(y.double() + step) - found.cdf(y.double() - step)) / (2 * step)
        smooth = (slope.log()[:, 0] - found.log_likelihood).abs() < 1e-3
        assert smooth.double().mean() > 0.95  # but at the knots
        assert (found.cdf(found.quantile(0.2)) - 0.2).abs().max() < 1e-5
        at = torch.linspace(-12, 12, 48001).double()
        row = replace(
            found,
            **{name: getattr(found, name)[:1].expand(len(at), 1) for name in ("mean", "aleatoric", "epistemic")},
        )
        function = row.cdf(at.unsqueeze(1))[:, 0]
        area = torch.trapezoid((function - (at >= y[0, 0]).double()).square(), at)
        assert float(found.crps()[0]) == pytest.approx(float(area), abs=1e-3)


def test_conformal_intervals_stand_beside_the_mixture(mlp: Network) -> None:
    """They are multiples of the standard deviation, with a promise of their own; nothing else changes."""
    posterior = credo.BBB(mlp(3, 1), data_size=10, likelihood=credo.GaussianNoise(0.3), init=0.4)
    x, y = torch.randn(60, 3), torch.randn(60, 1)
    before = credo.predict(posterior, [(x, y)])
    credo.conformal(posterior, [(x, y)], alpha=0.2)
    after = credo.predict(posterior, [(x, y)])
    for end in (0, 1):
        assert after.interval(0.7)[end].equal(before.interval(0.7)[end])
    assert after.lower is not None
    assert after.upper is not None
    torch.testing.assert_close((after.lower + after.upper) / 2, after.mean.double())
    ratio = (after.upper - after.lower) / after.total
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


@pytest.mark.parametrize("likelihood", [credo.GaussianNoise(0.3), credo.likelihoods.Poisson()])
def test_predictions_without_their_draws_say_so(likelihood: Any, mlp: Network) -> None:
    posterior = credo.BBB(mlp(3, 1), data_size=10, likelihood=likelihood, init=0.4)
    batches = [(torch.randn(7, 3), torch.ones(7, 1))] * 2
    kept, dropped = (credo.predict(posterior, batches, draws=12, keep_draws=keep) for keep in (True, False))
    for name in ("mean", "aleatoric", "epistemic", "log_likelihood", "draws_used"):
        assert getattr(kept, name).equal(getattr(dropped, name))
    assert credo.evaluate.quick_metrics(kept) == credo.evaluate.quick_metrics(dropped)
    assert sum(value.numel() for value in vars(dropped).values() if isinstance(value, Tensor)) == 14 * 6
    for call in (dropped.pit, dropped.crps, dropped.interval, lambda: dropped.quantile(0.3)):
        with pytest.raises(ValueError, match="keep_draws=True"):
            call()
    alone = credo.predict(
        credo.MAP(mlp(3, 1), data_size=10, likelihood=credo.GaussianNoise(0.3)), batches[0][0], keep_draws=False
    )
    assert alone.quantile(0.5).equal(alone.mean)


def test_a_value_for_each_entry(mlp: Network) -> None:
    posterior = credo.BBB(mlp(3, 1), data_size=10, likelihood=credo.GaussianNoise(0.3))
    with pytest.raises(ValueError, match=r"y has shape \[7\], the mean \[7, 1\]"):
        credo.predict(posterior, torch.randn(7, 3)).cdf(torch.zeros(7))


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = NormalMixture(drawn(2)[0], drawn().transpose(0, 1), torch.full((ROWS, 1, TARGETS), 0.2).double())
    y = drawn(5)[0]
    whole = mixture.cdf(y), mixture.quantile(0.3), mixture.crps(y)
    monkeypatch.setattr(target_distribution, "_BLOCK", 30)
    torch.testing.assert_close((mixture.cdf(y), mixture.quantile(0.3), mixture.crps(y)), whole)


def test_crps_of_a_mixture_as_a_function() -> None:
    means, stds, y = drawn(), 0.1 + drawn(3).abs(), drawn(2)[0]
    expected = np.array(
        [
            [
                crps(means[:, row, column].numpy(), stds[:, row, column].numpy(), float(y[row, column]))
                for column in (0, 1)
            ]
            for row in range(ROWS)
        ]
    )
    found = credo.evaluate.crps_mixture_each(means, stds, y)
    torch.testing.assert_close(found, torch.from_numpy(expected.mean(1)), rtol=1e-7, atol=1e-7)
    assert credo.evaluate.crps_mixture(means, stds, y) == pytest.approx(expected.mean(), rel=1e-7)
    one = credo.evaluate.crps_mixture(means[:1], 0.3, y)
    assert one == pytest.approx(credo.evaluate.crps_gaussian(means[0], 0.3, y), rel=1e-9)
