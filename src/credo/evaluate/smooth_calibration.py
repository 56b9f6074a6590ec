"""Calibration errors without the bias of bins: the debiased error of bins, and the smooth calibration error."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from credo.evaluate.calibration import bin_index
from credo.evaluate.checks import check_classification

# exp(−(π·k·σ)²/2) is below 1e-14 for the terms k that are left out.
_REACH = 8.0
_FEWEST_TERMS, _MOST_TERMS = 64, 4096
# Entries worked on at a time.
_CHUNK = 2**21


def debiased_ece(probs: Tensor, labels: Tensor, *, bins: int = 15) -> float:
    """Root mean square of the bins' calibration gaps without the part that is sampling noise (Kumar et al. 2019).

    √(Σ_b (n_b/n)·(gap_b² − s_b²/n_b)), where s_b² is the variance of (correct − confidence) in a bin: without bias in
    the square for any number of rows, 0 if noise explains the gaps. Bins with one row are left out. What it estimates,
    a root mean square, is not below the mean absolute gap that `ece` estimates.

    Args:
        probs: Class probabilities [batch, classes].
        labels: Class indices [batch].
        bins: Number of bins of equal width.
    """
    confidence, residuals = _residuals(probs, labels)
    index = bin_index(confidence, bins)
    count = torch.bincount(index, minlength=bins)
    sums = torch.bincount(index, weights=residuals, minlength=bins)
    squares = torch.bincount(index, weights=(residuals - (sums / count)[index]).square(), minlength=bins)
    many = count > 1
    n, gap, within = count[many], (sums / count)[many], squares[many]
    square = (n * (gap.square() - within / (n * (n - 1)))).sum() / max(int(n.sum()), 1)
    return math.sqrt(max(float(square), 0.0))


def smooth_ece(probs: Tensor, labels: Tensor) -> float:
    """Smooth calibration error of the most probable class (smECE, Błasiok & Nakkiran 2023); it has no bins.

    The residuals correct − confidence are smoothed over the confidence by a Gaussian kernel of bandwidth σ, reflected
    at 0 and 1. smECE_σ is the integral of their absolute value, which falls in σ; the result is where smECE_σ = σ.

    Args:
        probs: Class probabilities [batch, classes].
        labels: Class indices [batch].
    """
    confidence, residuals = _residuals(probs, labels)
    terms = _FEWEST_TERMS
    while True:
        # The reflected kernel is diagonal in cosines: Σ_k exp(−(πkσ)²/2)·a_k·cos(πkt), a_k the residuals' moments.
        moments = _cosine_moments(confidence, residuals, terms)
        smallest = _REACH / (math.pi * terms)
        if _smoothed(moments, smallest) > smallest or terms >= _MOST_TERMS:
            return _fixed_point(moments, smallest)
        terms *= 4


def _residuals(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence, and correct − confidence in float64."""
    probs, labels = check_classification(probs, labels)
    confidence, predicted = probs.max(-1)
    return confidence.cpu(), (predicted == labels).double().cpu() - confidence.double().cpu()


def _cosine_moments(confidence: Tensor, residuals: Tensor, terms: int) -> Tensor:
    """(2 − [k = 0])·mean(residual·cos(πk·confidence)) for each k."""
    angles, found = math.pi * torch.arange(terms, dtype=torch.float64), torch.zeros(terms, dtype=torch.float64)
    for c, r in zip(confidence.double().split(_CHUNK // terms), residuals.split(_CHUNK // terms), strict=True):
        found += r @ torch.cos(c[:, None] * angles)
    found[1:] *= 2
    return found / len(residuals)


def _smoothed(moments: Tensor, bandwidth: float) -> float:
    """smECE at a bandwidth, by midpoints that are a quarter of it apart or closer."""
    terms = min(len(moments), math.ceil(_REACH / (math.pi * bandwidth)) + 1)
    k, points = torch.arange(terms, dtype=torch.float64), max(200, math.ceil(4 / bandwidth))
    weighted = moments[:terms] * (-0.5 * (math.pi * bandwidth * k).square()).exp()
    # Σ_k w_k·cos(πk·(j + ½)/points) for every midpoint j, by one Fourier transform; there are fewer terms than points.
    turned = weighted * torch.exp(0.5j * math.pi / points * k)
    return float(torch.fft.ifft(turned, n=2 * points, norm="forward")[:points].real.abs().mean())


def _fixed_point(moments: Tensor, smallest: float) -> float:
    """Where smECE equals its bandwidth; below the smallest bandwidth, smECE there."""
    low, high = smallest, 1.0
    if _smoothed(moments, low) <= low:
        return _smoothed(moments, low)
    while high - low > 1e-4 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _smoothed(moments, middle) > middle else (low, middle)
    return 0.5 * (low + high)
