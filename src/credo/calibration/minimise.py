"""Minima: of one variable by a grid that brackets it, then golden sections; of tensors by L-BFGS."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_GOLDEN = (math.sqrt(5) - 1) / 2


def golden_section(value: Callable[[float], float], low: float, high: float, *, tolerance: float = 1e-5) -> float:
    """A minimum of `value` between `low` and `high`; the minimum, if there is only one.

    Args:
        value: The function.
        low: Lower end of the bracket.
        high: Upper end.
        tolerance: How close to the minimum the result is.
    """
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = value(left), value(right)
    while high - low > 2 * tolerance:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = value(right)
    return left if at_left <= at_right else right


def vertex(grid: Sequence[float], values: Sequence[float]) -> float:
    """The minimum of values on an even grid: of the parabola through the lowest point and its neighbours.

    Args:
        grid: Evenly spaced points.
        values: The function there.
    """
    index = min(range(len(values)), key=values.__getitem__)
    if not 0 < index < len(grid) - 1:
        return grid[index]
    before, lowest, after = values[index - 1 : index + 2]
    curvature = before - 2 * lowest + after
    if not (math.isfinite(curvature) and curvature > 0):
        return grid[index]
    return grid[index] + 0.5 * (before - after) / curvature * (grid[1] - grid[0])


def lbfgs(cost: Callable[[list[Tensor]], Tensor], start: list[Tensor]) -> list[Tensor]:
    """The minimum of a smooth convex function of tensors, by L-BFGS.

    Args:
        cost: The function.
        start: Where to start, float64.
    """
    parts = [part.detach().clone().requires_grad_() for part in start]
    optimizer = torch.optim.LBFGS(
        parts,
        max_iter=500,
        tolerance_grad=1e-6,
        tolerance_change=1e-11,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = cost(parts)
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    return [part.detach() for part in parts]
