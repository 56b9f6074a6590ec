"""From the gradients of a weighted mean to the squares that a batch with repeated rows would have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from credo.core.example_counts import Counted


@dataclass(frozen=True)
class Balance:
    """What single rows' gradients of Σ wᵢ·ℓᵢ / n are multiplied by so that their squares add up to Σ wᵢ·(∂ℓᵢ/∂w)².

    A pass shows wᵢ·gᵢ/n. Row i is multiplied by `roots`, √(w̄/wᵢ) with w̄ the mean of the weights above zero (so that
    numbers keep their size), and the sum of squares by n²/w̄.
    """

    roots: Tensor | None
    mean: float

    def __call__(self, each: Tensor, part: slice = slice(None)) -> Tensor:
        """Rows [rows, ...], or part of them, times their factor."""
        if self.roots is None:
            return each
        return each * self.roots[part].to(each).view(-1, *[1] * (each.dim() - 1))


def balance_of(counted: Counted) -> Balance:
    """Nothing to do without weights."""
    weights = counted.weights
    if weights is None:
        return Balance(None, 1.0)
    counts = weights > 0
    mean = float(weights[counts].mean())
    return Balance(torch.where(counts, mean / weights.where(counts, 1.0), 0.0).sqrt(), mean)
