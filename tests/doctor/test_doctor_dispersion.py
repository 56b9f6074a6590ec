"""Observed against expected errors: calibrated predictions, sharpened and flattened ones, z-scores and coverage."""

import math

import pytest
import torch
from torch import Tensor

from credo.core.likelihood import Categorical, GaussianNoise
from credo.doctor.measure.dispersion import Dispersion, dispersion, ratio
from credo.doctor.measure.predictive import make_predictive


def classes(sharpness: float, n: int = 4000) -> Dispersion:
    """Labels drawn from softmax(z); the predictive is softmax(sharpness·z)."""
    generator = torch.Generator().manual_seed(0)
    z = 1.5 * torch.randn(n, 5, generator=generator)
    labels = torch.multinomial(z.softmax(-1), 1, generator=generator)[:, 0]
    return dispersion(make_predictive([Categorical()], sharpness * z.unsqueeze(0), labels))


def test_a_calibrated_predictive_is_as_good_as_it_says() -> None:
    """A 95 % interval misses one run in twenty; the seed is fixed, and twice its width is allowed."""
    found = classes(1.0)
    half = (found.surprise.high - found.surprise.low) / 2
    assert abs(found.surprise.value - 1) < 2 * half
    assert found.excess is not None
    assert abs(found.excess.value) < found.excess.high - found.excess.low
    assert found.details["confidence"] == pytest.approx(found.details["accuracy"], abs=0.03)
    assert found.epistemic_fraction == 0.0


@pytest.mark.parametrize(("sharpness", "over"), [(3.0, True), (0.3, False)])
def test_sharpened_and_flattened_predictions(sharpness: float, over: bool) -> None:
    found = classes(sharpness)
    assert found.excess is not None
    if over:
        assert found.surprise.low > 1.5
        assert found.excess.low > 0
        assert found.details["overconfidence"]["low"] > 0
    else:
        assert found.surprise.high < 1
        assert found.excess.high < 0
        assert found.details["overconfidence"]["high"] < 0


def test_entropy_nll_and_epistemic_share_in_closed_form() -> None:
    """Two draws, p = (0.9, 0.1) and (0.1, 0.9): H[p̄] = log 2, each draw has H(0.9)."""
    logits = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log().unsqueeze(1).expand(2, 6, 2)
    found = dispersion(make_predictive([Categorical()], logits, torch.tensor([0, 1, 0, 1, 0, 1])))
    each = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert found.details["entropy"] == pytest.approx(math.log(2), rel=1e-6)
    assert found.details["nll"] == pytest.approx(math.log(2), rel=1e-6)
    assert found.surprise.value == pytest.approx(1, rel=1e-6)
    assert found.epistemic_fraction == pytest.approx(1 - each / math.log(2), rel=1e-5)


def test_a_ratio_of_means_and_its_interval() -> None:
    """Against the delta method: Var(a̅/b̅) ≈ Var(a − r·b)/(n·b̅²)."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(2000, generator=generator, dtype=torch.float64) + shift for shift in (0.5, 1.0))
    found = ratio(a, b)
    value = float(a.mean() / b.mean())
    error = float((a - value * b).std() / (b.mean() * math.sqrt(len(a))))
    assert found.value == pytest.approx(value)
    assert (found.high - found.low) / (2 * 1.96) == pytest.approx(error, rel=0.15)
    assert ratio(a, torch.zeros_like(a)).value == math.inf


def curve(noise: float, spread: float = 0.0, n: int = 3000, draws: int = 50) -> Dispersion:
    """Targets N(0, 1); the predictive's noise is `noise`, its draws differ by `spread`."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(n, 1, generator=generator)
    shifts = spread * torch.randn(draws, 1, 1, generator=generator)
    outputs: Tensor = (shifts - shifts.mean(0)).expand(draws, n, 1)
    return dispersion(make_predictive([GaussianNoise(noise)], outputs, y))


@pytest.mark.parametrize(("noise", "wanted"), [(1.0, 1.0), (0.5, 4.0), (2.0, 0.25)])
def test_squared_z_scores(noise: float, wanted: float) -> None:
    """Mean z² of 3,000 normal targets: relative standard error 2.6 %, tolerance 10 %."""
    found = curve(noise)
    assert found.surprise.value == pytest.approx(wanted, rel=0.1)
    assert found.details["mean_z_squared"] == pytest.approx(found.surprise.value)
    assert found.surprise.low < found.surprise.value < found.surprise.high
    normal = torch.distributions.Normal(0.0, 1.0)
    inside = 2 * float(normal.cdf(normal.icdf(torch.tensor(0.95)) * noise)) - 1
    assert found.details["coverage"]["0.9"] == pytest.approx(inside, abs=0.03)
    assert (found.excess, found.epistemic_fraction) == (None, 0.0)


def test_noise_and_doubt_of_a_regression() -> None:
    found = curve(0.8, spread=0.6, draws=2000)
    assert found.details["aleatoric"] == pytest.approx(0.8, rel=1e-5)
    assert found.details["epistemic"] == pytest.approx(0.6, rel=0.1)
    assert found.epistemic_fraction == pytest.approx(0.36, rel=0.15)
    assert found.surprise.value == pytest.approx(1.0, rel=0.1)


def test_coverage_is_that_of_the_mixture_of_draws() -> None:
    """Draws that say −1 and 1 where half of the targets are each: the normal of the same moments misses both."""
    generator = torch.Generator().manual_seed(0)
    side = torch.sign(torch.rand(2000, 1, generator=generator) - 0.5)
    y = side + 0.1 * torch.randn(2000, 1, generator=generator)
    outputs = torch.tensor([-1.0, 1.0]).view(2, 1, 1).expand(2, 2000, 1)
    found = dispersion(make_predictive([GaussianNoise(0.1)], outputs, y)).details["coverage"]
    assert {level: found[level] for level in ("0.5", "0.8")} == pytest.approx({"0.5": 0.5, "0.8": 0.8}, abs=0.03)


def test_several_targets_count_equally() -> None:
    y = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    found = dispersion(make_predictive([GaussianNoise(1.0)], torch.zeros(1, 2, 2), y))
    assert found.surprise.value == pytest.approx(2.5)


def test_plain_numbers() -> None:
    assert set(curve(1.0).to_dict()) >= {"surprise", "excess", "epistemic_fraction", "coverage"}
    assert set(classes(1.0, n=50).to_dict()["surprise"]) == {"value", "low", "high"}
