"""Fit the distribution of standardised residuals on held-out rows: its scale, or its quantiles."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from credo.calibration.class_fits import PRIOR, padded
from credo.core.held_out.value_map import ResidualMap

# The fewest rows between two knots of a quantile map; more of them with more rows.
_FEWEST = 8


def fit_std_scale(residuals: Tensor, prior: float = PRIOR) -> ResidualMap:
    """A factor on the standard deviation of each output: c² = (Σ r² + κ)/(rows + κ).

    Args:
        residuals: (target − mean)/total, [rows, outputs], float64.
        prior: κ, rows of which r² is 1.
    """
    squares = residuals.square().sum(0) + prior
    empty = residuals.new_zeros(residuals.shape[1], 0)
    scale = (squares / (len(residuals) + prior)).sqrt().clamp_min(1e-6)  # all residuals may be 0
    return ResidualMap(scale, empty, empty)


def fit_quantile(residuals: Tensor, prior: float = PRIOR) -> ResidualMap:
    """The PIT map of Kuleshov et al. (2018), as a histogram with bins of equal mass in Φ(r/c): it has a density.

    The distribution function of the PITs of n rows rises already, so its isotonic regression is itself. It is taken
    between every √n (at least eight) rows, and mixed with κ rows that follow the normal one of `fit_std_scale`.

    Args:
        residuals: (target − mean)/total, [rows, outputs], float64.
        prior: κ.
    """
    scale = fit_std_scale(residuals, prior).scale
    curves = [_curve(column, prior) for column in (residuals / scale).T]
    most = max(len(knots) for knots, _ in curves)
    # Of no knots at all, one in the middle stands for them, which changes nothing.
    curves = [curve if len(curve[0]) else (torch.zeros_like(scale[:1]), scale.new_full((1,), 0.5)) for curve in curves]
    knots, levels = (
        (torch.stack([padded(curve[side], most) for curve in curves]) for side in (0, 1))
        if most
        else (2 * [residuals.new_zeros(len(scale), 0)])
    )
    return ResidualMap(scale, knots, levels)


VALUE_FITS: dict[str, Callable[[Tensor, float], ResidualMap]] = {
    "std-scale": fit_std_scale,
    "quantile": fit_quantile,
}


def _curve(z: Tensor, prior: float) -> tuple[Tensor, Tensor]:
    """Knots half-way between neighbours in order, and the levels there."""
    rows = len(z)
    ordered, size = z.sort().values, max(_FEWEST, round(math.sqrt(rows)))
    bins = rows // size
    last = [rows * k // bins for k in range(1, bins)]  # rows below each knot
    knots = torch.stack([(ordered[i - 1] + ordered[i]) / 2 for i in last]).unique() if last else z.new_zeros(0)
    below = torch.searchsorted(ordered, knots, right=True)
    levels = (below + prior * torch.special.ndtr(knots)) / (rows + prior)
    inside = (knots.abs() < 8) & (levels > 0) & (levels < 1)  # beyond, Φ is 0 or 1 but for rounding
    return knots[inside], levels[inside]
