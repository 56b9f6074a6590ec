"""Calibration errors without bins, or without their bias, against slow and obvious implementations."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor

from credo.evaluate import debiased_ece, ece, miscalibration_area, smooth_ece
from credo.evaluate.smooth_calibration import _cosine_moments, _residuals, _smoothed


def drawn(rows: int, power: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Probabilities, and labels that follow their power."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), torch.multinomial((power * logits).softmax(-1), 1, generator=generator)[:, 0]


def slow_smoothed(confidence: np.ndarray, residuals: np.ndarray, bandwidth: float) -> float:
    """The kernel with its reflections, written out, on a fine grid."""
    at = (np.arange(4000) + 0.5) / 4000
    total = np.zeros_like(at)
    for c, r in zip(confidence, residuals, strict=True):
        for image in [k + sign * c for k in range(-8, 9, 2) for sign in (-1, 1)]:
            total += r * np.exp(-(((at - image) / bandwidth) ** 2) / 2) / (bandwidth * math.sqrt(2 * math.pi))
    return float(np.abs(total / len(confidence)).mean())


@pytest.mark.parametrize("power", [1.0, 0.4])
def test_the_smooth_error_is_the_fixed_point_of_the_kernel_written_out(power: float) -> None:
    probs, labels = drawn(40, power)
    confidence, residuals = (value.double() for value in _residuals(probs, labels))
    moments = _cosine_moments(confidence, residuals, 512)
    for bandwidth in (0.02, 0.1, 0.5):
        slow = slow_smoothed(confidence.numpy(), residuals.numpy(), bandwidth)
        assert _smoothed(moments, bandwidth) == pytest.approx(slow, rel=5e-3)
    fixed = brentq(lambda s: slow_smoothed(confidence.numpy(), residuals.numpy(), s) - s, 0.01, 1.0, xtol=1e-4)
    assert smooth_ece(probs, labels) == pytest.approx(fixed, abs=1e-3)


def test_the_smooth_error_of_known_cases() -> None:
    certain = torch.eye(2).double()[torch.zeros(100).long()]
    assert smooth_ece(certain, torch.zeros(100).long()) == pytest.approx(0.0, abs=1e-12)
    assert smooth_ece(certain, torch.ones(100).long()) == pytest.approx(1.0, abs=2e-3)
    half = torch.full((100, 2), 0.5).double()
    assert smooth_ece(half, torch.arange(100) % 2) == pytest.approx(0.0, abs=1e-12)
    probs, labels = drawn(20_000, 0.5)
    assert smooth_ece(probs, labels) == pytest.approx(ece(probs, labels), rel=0.15)
    assert smooth_ece(*drawn(20_000, 1.0)) < 0.02
    assert smooth_ece(probs.float(), labels) == pytest.approx(smooth_ece(probs, labels), abs=1e-4)


def test_the_debiased_error_is_that_of_each_bin_written_out() -> None:
    probs, labels = drawn(60, 0.5)
    confidence, predicted = probs.max(-1)
    total, rows = 0.0, 0
    for low in range(10):
        inside = (confidence > low / 10) & (confidence <= (low + 1) / 10)
        gaps = ((predicted == labels).double() - confidence)[inside].numpy()
        if len(gaps) > 1:
            total += len(gaps) * (gaps.mean() ** 2 - gaps.var(ddof=1) / len(gaps))
            rows += len(gaps)
    assert debiased_ece(probs, labels, bins=10) == pytest.approx(math.sqrt(max(total / rows, 0)), abs=1e-12)
    with pytest.raises(ValueError, match="bins"):
        debiased_ece(probs, labels, bins=0)


def test_the_debiased_error_has_no_bias_in_its_square() -> None:
    """One bin with a true gap of 0.1: over 4,000 samples of 20 rows the mean square is 0.01; that of `ece` is not."""
    generator = torch.Generator().manual_seed(0)
    hits = torch.rand(4000, 20, generator=generator) < 0.6
    probs = torch.tensor([[0.7, 0.3]], dtype=torch.float64).expand(20, 2)
    plain = np.mean([ece(probs, (~one).long()) ** 2 for one in hits])
    gaps = hits.double().mean(1) - 0.7
    unbiased = gaps.square() - hits.double().var(1) / 20
    assert float(unbiased.mean()) == pytest.approx(0.01, abs=5 * float(unbiased.std()) / math.sqrt(4000))
    assert plain == pytest.approx(0.01 + 0.24 / 20, rel=0.1)
    ours = [debiased_ece(probs, (~one).long()) ** 2 for one in hits[:200]]
    np.testing.assert_allclose(ours, unbiased[:200].clamp_min(0), atol=1e-12)


def test_the_miscalibration_area_is_that_of_a_fine_grid() -> None:
    generator = torch.Generator().manual_seed(0)
    pit = torch.rand(50, generator=generator, dtype=torch.float64).square()
    grid = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    slow = ((pit[:, None] <= grid).double().mean(0) - grid).abs().mean()
    assert miscalibration_area(pit) == pytest.approx(float(slow), abs=1e-4)
    assert miscalibration_area(torch.zeros(5)) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="outside"):
        miscalibration_area(torch.tensor([2.0]))
