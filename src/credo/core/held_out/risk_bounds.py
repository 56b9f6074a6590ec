"""How much all calibration rows may lose together so that the mean loss of new rows is at most α: pure functions.

Losses lie between 0 and 1 and never fall as the threshold grows.
"""

from __future__ import annotations

import math
from fractions import Fraction

from credo.core.support.binomial import binomial_cdf

_HALVINGS = 60


def loss_budget(rows: int, alpha: float, confidence: float | None, *, is_binary: bool = False) -> float:
    """The largest sum of losses of the calibration rows for which the threshold may stand; negative if none may.

    Without a confidence, conformal risk control (Angelopoulos et al. 2024): n/(n + 1)·R̂ + 1/(n + 1) ≤ α keeps the
    expected loss of a new row. With one, an upper limit of the mean loss (Bates et al. 2021): of Hoeffding and
    Bentkus, or where losses are 0 or 1 the exact binomial limit. Losses are monotone, so the largest threshold that
    passes needs no correction for those that were tried.

    Args:
        rows: Number of calibration rows.
        alpha: Largest mean loss.
        confidence: Probability that it is kept; None: it is kept on average.
        is_binary: Whether a loss is always 0 or 1.
    """
    if confidence is None:
        return float(Fraction(repr(float(alpha))) * (rows + 1) - 1)
    error = 1 - confidence
    if is_binary:
        return float(_largest_count(rows, alpha, error))
    return max(_hoeffding(rows, alpha, error), float(_largest_count(rows, alpha, error / math.e)))


def rows_for(alpha: float, confidence: float | None) -> int:
    """The least number of rows for which a threshold may stand, if they lose nothing.

    Args:
        alpha: Largest mean loss.
        confidence: As in `loss_budget`.
    """
    if confidence is None:
        return math.ceil(1 / Fraction(repr(float(alpha)))) - 1
    needed = max(math.ceil(math.log(1 - confidence) / math.log1p(-alpha) - 1e-9), 1)
    return needed if loss_budget(needed, alpha, confidence) >= 0 else needed + 1


def _largest_count(rows: int, alpha: float, error: float) -> int:
    """The largest k with P(K ≤ k) ≤ error for K ~ Binomial(rows, alpha); −1 if there is none."""
    low, high = -1, rows
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if binomial_cdf(middle, rows, alpha) <= error else (low, middle)
    return low


def _hoeffding(rows: int, alpha: float, error: float) -> float:
    """The largest sum s with exp(−n·h(s/n, α)) ≤ error, h the relative entropy of two yes/no variables."""
    wanted = -math.log(error) / rows if rows else math.inf
    if _entropy(0.0, alpha) < wanted:
        return -1.0
    low, high = 0.0, alpha
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _entropy(middle, alpha) >= wanted else (low, middle)
    return low * rows


def _entropy(mean: float, alpha: float) -> float:
    own = 0.0 if mean == 0 else mean * math.log(mean / alpha)
    return own + (1 - mean) * math.log((1 - mean) / (1 - alpha))
