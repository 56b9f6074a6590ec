"""Scores of split conformal prediction, how badly a target fits a prediction: pure functions of tensors, in float64.

Classes of equal probability get equal scores: they are in a set together, or not at all.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

# Odd constants of a 64-bit mixing function, as signed numbers.
_FIRST, _SECOND = -0x61C8864680B583EB, -0x4B47D0C5A4B9B1F5


def lac_scores(probs: Tensor) -> Tensor:
    """1 − p of every class (Sadinle et al. 2019), [n, classes].

    Args:
        probs: Class probabilities [n, classes].
    """
    return 1.0 - probs.double()


def aps_scores(probs: Tensor, uniforms: Tensor | None, *, penalty: float = 0.0, k_reg: int = 0) -> Tensor:
    """Probability mass of the classes before each one, and a part of its own (Romano et al. 2020), [n, classes].

    The part is u, one for each row, of the mass of all classes that are as probable as this one. The regularised score
    (RAPS, Angelopoulos et al. 2021) adds `penalty`·(rank − `k_reg`) for classes of rank beyond `k_reg`.

    Args:
        probs: Class probabilities [n, classes].
        uniforms: u of each row [n]; None takes 1, the whole mass.
        penalty: λ of RAPS; 0 is APS.
        k_reg: Classes of each row without a penalty.
    """
    values = probs.double()
    ordered = values.sort(-1, descending=True).values
    mass = torch.nn.functional.pad(ordered.cumsum(-1), (1, 0))
    before = torch.searchsorted(-ordered, -values)  # number of classes that are more probable
    after = torch.searchsorted(-ordered, -values, right=True)
    above = mass.gather(-1, before)
    own = mass.gather(-1, after) - above
    scores = above + (own if uniforms is None else uniforms.double().unsqueeze(-1) * own)
    return scores + penalty * (before + 1 - k_reg).clamp_min(0)


def row_uniforms(probs: Tensor) -> Tensor:
    """One number in [0, 1) for each row, spread evenly, that is a function of the row's probabilities alone, [n].

    So the same prediction gives the same set, in any batch and any call, and scores of calibration rows and of new rows
    are of one function.

    Args:
        probs: Class probabilities [n, classes].
    """
    bits = _mixed(probs.double().contiguous().view(torch.int64))
    odd = 2 * torch.arange(probs.shape[-1], device=probs.device) + 1
    return (_mixed((bits * odd).sum(-1)) & (2**53 - 1)).double() / 2**53


def residual_scores(y: Tensor, mean: Tensor, std: Tensor | None = None) -> Tensor:
    """|y − mean|, in units of `std` if given; the largest of all outputs, [n].

    Args:
        y: Targets [n, outputs].
        mean: Predicted means [n, outputs].
        std: Predicted standard deviations [n, outputs].
    """
    residuals = (y.double() - mean.double()).abs()
    return (residuals if std is None else residuals / positive(std)).amax(-1)


def quantile_scores(y: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """How far y lies outside [lower, upper], negative inside (Romano et al. 2019); the largest of all outputs, [n].

    Args:
        y: Targets [n, outputs].
        lower: Lower quantiles [n, outputs].
        upper: Upper quantiles [n, outputs].
    """
    values = y.double()
    return torch.maximum(lower.double() - values, values - upper.double()).amax(-1)


def positive(std: Tensor) -> Tensor:
    """Standard deviations in float64 that one can divide by."""
    return std.double().clamp_min(torch.finfo(torch.float64).tiny)


def rank_of(alpha: float, rows: int) -> int:
    """⌈(rows + 1)(1 − alpha)⌉ of the decimal number alpha: which of the ordered scores is the threshold.

    Args:
        alpha: Probability of a miss.
        rows: Number of calibration rows.
    """
    return math.ceil((rows + 1) * (1 - Fraction(repr(float(alpha)))))


def rows_needed(alpha: float) -> int:
    """The least number of rows for which the threshold is finite.

    Args:
        alpha: Probability of a miss.
    """
    return math.ceil(1 / Fraction(repr(float(alpha)))) - 1


def threshold(scores: Tensor, alpha: float) -> float:
    """The ⌈(n + 1)(1 − alpha)⌉-th smallest of n scores; infinite if there are fewer.

    Args:
        scores: Of calibration rows [n].
        alpha: Probability of a miss.
    """
    rank = rank_of(alpha, len(scores))
    return math.inf if rank > len(scores) else float(scores.double().kthvalue(rank).values)


def _mixed(bits: Tensor) -> Tensor:
    """Spread what differs between 64-bit integers over all of their bits; products overflow as they should."""
    bits = (bits ^ (bits >> 32)) * _FIRST
    bits = (bits ^ (bits >> 29)) * _SECOND
    return bits ^ (bits >> 32)
