"""Arithmetic over the examples of a batch: weighted rows, and gradients that are sums over several calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.core.example_counts import Counted
from credo.core.per_example.layer_rules import widened

Examples = Callable[[slice], Tensor]
"""Gradients of some of the examples, [examples, *shape]."""

# Entries of per-example gradients that may exist at once.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class ExampleWeights:
    """Factors for the rows' gradients of Σ wᵢ·ℓᵢ / n, after which their squares add up to Σ wᵢ·(∂ℓᵢ/∂w)².

    A pass shows wᵢ·gᵢ/n. Row i is multiplied by `roots`, √(w̄/wᵢ) with w̄ the mean of the weights above zero (so that
    numbers keep their size), and the sum of squares by n²/w̄.
    """

    roots: Tensor
    mean: float

    def __call__(self, each: Tensor, part: slice = slice(None)) -> Tensor:
        """Rows [rows, ...], or part of them, times their factor."""
        return each * self.roots[part].to(each).view(-1, *[1] * (each.dim() - 1))


def example_weights(counted: Counted) -> ExampleWeights | None:
    """The factors for these counts; None if every row counts once."""
    weights = counted.weights
    if weights is None:
        return None
    counts = weights > 0
    mean = float(weights[counts].mean())
    return ExampleWeights(torch.where(counts, mean / weights.where(counts, 1.0), 0.0).sqrt(), mean)


def added_up(
    names: Sequence[str],
    calls: Sequence[Callable[[slice], Mapping[str, Tensor]]],
    entries: int,
    batch_size: int,
    weights: ExampleWeights | None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Σ over examples of the gradients, and of their squares times batch_size², by name.

    Args:
        names: The parameters.
        calls: For each call, a function that gives their gradients for some of the examples.
        entries: How many entries the parameters have in all.
        batch_size: The number of examples.
        weights: How often each example counts.
    """
    totals: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    for start in range(0, batch_size, step := max(1, _CHUNK // max(1, entries))):
        part = slice(start, min(batch_size, start + step))
        found = [call(part) for call in calls]
        for name in names:
            each = widened(sum((f[name] for f in found[1:]), start=found[0][name]))
            total = each.sum(0)
            squared = (each if weights is None else weights(each, part)).square().sum(0).mul_(batch_size * batch_size)
            totals[name] = totals[name].add_(total) if name in totals else total
            squares[name] = squares[name].add_(squared) if name in squares else squared
    return totals, squares


def unexplained(
    totals: Mapping[str, Tensor], sums: Mapping[str, Any], squares: Mapping[str, Tensor], batch_size: int, *, low: bool
) -> list[str]:
    """Parameters whose gradient is not what their module's runs, example by example, add up to.

    Args:
        totals: Gradients of the pass.
        sums: What the runs add up to.
        squares: Their squares times batch_size².
        batch_size: The number of examples.
        low: Whether the module runs below single precision.
    """
    left = []
    for name, total in totals.items():
        epsilon = torch.finfo(torch.bfloat16 if low else total.dtype).eps
        scale = total.norm()
        if name in sums:
            scale = scale + squares[name].sum().sqrt() / batch_size
            total = total - sums[name]
        if total.norm() > epsilon**0.5 * scale:
            left.append(name)
    return left
