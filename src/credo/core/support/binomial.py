"""Binomial tails and quantiles of Beta(a, b) with whole a and b: exact limits for a number of rows, without scipy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Halvings of [0, 1]: to the last digit of float64.
_HALVINGS = 60


def binomial_cdf(count: int, rows: int, chance: float) -> float:
    """P(K ≤ count) for K ~ Binomial(rows, chance).

    Args:
        count: The largest number of successes that counts.
        rows: Number of trials.
        chance: Of a success in one of them.
    """
    if count < 0 or count >= rows:
        return 0.0 if count < 0 else 1.0
    if not 0 < chance < 1:
        return 1.0 if chance <= 0 else 0.0
    shorter = count + 1 <= rows - count
    numbers = torch.arange(0, count + 1) if shorter else torch.arange(count + 1, rows + 1)
    tail = _probabilities(numbers.double(), rows, chance)
    return tail if shorter else 1.0 - tail


def beta_quantile(level: float, a: int, b: int) -> float:
    """The x with P(X ≤ x) = level for X ~ Beta(a, b); 0 if a is 0, 1 if b is 0.

    Args:
        level: Probability below the quantile.
        a: First parameter, a whole number.
        b: Second parameter, a whole number.
    """
    if a <= 0 or b <= 0:
        return 0.0 if a <= 0 else 1.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        # P(X ≤ x) is the chance of a or more successes in a + b − 1 trials.
        below = 1.0 - binomial_cdf(a - 1, a + b - 1, middle)
        low, high = (middle, high) if below < level else (low, middle)
    return 0.5 * (low + high)


def _probabilities(numbers: Tensor, rows: int, chance: float) -> float:
    """The sum of the probabilities of these numbers of successes."""
    ways = math.lgamma(rows + 1) - torch.lgamma(numbers + 1) - torch.lgamma(rows - numbers + 1)
    logs = ways + numbers * math.log(chance) + (rows - numbers) * math.log1p(-chance)
    return min(float(logs.logsumexp(0).exp()), 1.0)
