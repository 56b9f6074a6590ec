"""The distribution of standardised residuals of a regression, which takes the normal distribution's place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from credo.core.held_out.class_maps import check_finite


def normal_density(z: Tensor) -> Tensor:
    """φ(z)."""
    return (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)


def normal_cdf(z: Tensor) -> Tensor:
    """Φ(z)."""
    found: Tensor = torch.special.ndtr(z)
    return found


@dataclass(frozen=True, eq=False)
class ResidualMap:
    """The distribution of the residual r = (target − mean)/total of each output: P(r ≤ c·z) = R(Φ(z)).

    R is linear between knots and rises from 0 to 1: the PIT map of quantile recalibration, with a density. Without
    knots the residuals are normal with standard deviation c. All methods take and give values [rows, outputs].

    Attributes:
        scale: c of each output, [outputs].
        knots: Rising z of the knots, [outputs, knots]; the last one is repeated where an output has fewer knots.
        levels: R(Φ(z)) there, rising, between 0 and 1; [outputs, knots].
    """

    scale: Tensor
    knots: Tensor
    levels: Tensor

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that are no distribution."""
        check_finite(scale=self.scale, knots=self.knots, levels=self.levels)
        is_whole = self.scale.dim() == 1 and self.knots.dim() == 2 and len(self.knots) == len(self.scale)
        if not is_whole or self.levels.shape != self.knots.shape:
            raise ValueError("a map of residuals needs scale [outputs], knots and levels [outputs, knots]")
        if bool((self.scale <= 0).any() or (self.levels <= 0).any() or (self.levels >= 1).any()):
            raise ValueError("scale must be positive, and levels between 0 and 1")
        wide, rise = self.knots.diff(dim=1) > 0, self.levels.diff(dim=1) > 0
        if bool((self.knots.diff(dim=1) < 0).any() or (wide != rise).any() or (self.levels.diff(dim=1) < 0).any()):
            raise ValueError("knots and levels of a map of residuals must rise together")

    @property
    def is_normal(self) -> bool:
        """Whether the residuals are normal."""
        return self.knots.shape[1] == 0

    def cdf(self, residuals: Tensor) -> Tensor:
        """The probability of a residual below each one."""
        z, piece = self._located(residuals)
        low = _at(self._ends, piece)
        return _at(self._values, piece) + _at(self._rates, piece) * (normal_cdf(z) - normal_cdf(low))

    def log_density(self, residuals: Tensor) -> Tensor:
        """Log of the density of residuals."""
        z, piece = self._located(residuals)
        constant = self.scale.log() + 0.5 * math.log(2 * math.pi)
        return _at(self._rates, piece).log() - 0.5 * z.square() - constant

    def quantile(self, level: float) -> Tensor:
        """The residual [outputs] that this part of all residuals is below.

        Args:
            level: Between 0 and 1.
        """
        at = torch.full((len(self.scale), 1), level, dtype=torch.float64)
        piece = torch.searchsorted(self.levels, at).T
        inside = (level - _at(self._values, piece)) / _at(self._rates, piece)
        found: Tensor = self.scale * torch.special.ndtri(normal_cdf(_at(self._ends, piece)) + inside)[0]
        return found

    @cached_property
    def mean(self) -> Tensor:
        """The mean residual of each output."""
        return -self.scale * (self._rates * normal_density(self._edges).diff(dim=1)).sum(1)

    @cached_property
    def std(self) -> Tensor:
        """The standard deviation of each output's residuals."""
        edges = self._edges
        finite = edges.nan_to_num(posinf=0.0, neginf=0.0)  # z·φ(z) is 0 there
        areas = normal_cdf(edges) - finite * normal_density(edges)
        squares = self.scale.square() * (self._rates * areas.diff(dim=1)).sum(1)
        return (squares - self.mean.square()).sqrt()

    def crps(self, residuals: Tensor) -> Tensor:
        """The continuous ranked probability score of residuals, ∫ (F(t) − 1[t ≥ r])² dt, in closed form."""
        mirrored = ResidualMap(self.scale, -self.knots.flip(1), 1 - self.levels.flip(1))
        return self._squared_area(residuals) + mirrored._squared_area(-residuals)

    def _squared_area(self, residuals: Tensor) -> Tensor:
        """∫ F² from −∞ to each residual."""
        z, piece = self._located(residuals)
        offset = self._values - self._rates * normal_cdf(self._ends)  # F = rate·Φ + offset in each piece

        def integral(at: Tensor, rates: Tensor, offsets: Tensor) -> Tensor:
            # Φ² = (zΦ² + 2Φφ − Φ(√2 z)/√π)′ and Φ = (zΦ + φ)′; all but z vanish at −∞, where the offset is 0.
            low, near = normal_cdf(at), normal_density(at)
            at = at.nan_to_num(neginf=0.0)
            squares = at * low.square() + 2 * low * near - normal_cdf(math.sqrt(2) * at) / math.sqrt(math.pi)
            return rates.square() * squares + 2 * rates * offsets * (at * low + near) + offsets.square() * at

        whole = integral(self._ends[:, 1:], self._rates[:, :-1], offset[:, :-1])
        starts = integral(self._ends, self._rates, offset)
        starts[:, 0] = 0.0
        before = torch.nn.functional.pad((whole - starts[:, :-1]).cumsum(1), (1, 0))
        return self.scale * (integral(z, _at(self._rates, piece), _at(offset, piece)) + _at(before - starts, piece))

    def _located(self, residuals: Tensor) -> tuple[Tensor, Tensor]:
        """z, and the piece that it lies in, [rows, outputs] each."""
        z = residuals.double() / self.scale
        return z, torch.searchsorted(self.knots, z.T.contiguous(), right=True).T

    @cached_property
    def _ends(self) -> Tensor:
        """Lower ends of the pieces, [outputs, knots + 1]."""
        return torch.nn.functional.pad(self.knots, (1, 0), value=-math.inf)

    @cached_property
    def _edges(self) -> Tensor:
        return torch.nn.functional.pad(self._ends, (0, 1), value=math.inf)

    @cached_property
    def _values(self) -> Tensor:
        return torch.nn.functional.pad(self.levels, (1, 0))

    @cached_property
    def _rates(self) -> Tensor:
        """Rates of change of R, [outputs, knots + 1]; 1 in pieces without width, where nothing is."""
        widths = _areas(self._edges)
        return torch.where(widths > 0, torch.nn.functional.pad(self._values, (0, 1), value=1.0).diff(dim=1), 1.0) / (
            torch.where(widths > 0, widths, 1.0)
        )


def _areas(edges: Tensor) -> Tensor:
    """Φ between neighbouring edges, by the upper tail where that is the smaller one."""
    below, above = normal_cdf(edges).diff(dim=1), -normal_cdf(-edges).diff(dim=1)
    return torch.where(edges[:, :-1] > 0, above, below)


def _at(table: Tensor, piece: Tensor) -> Tensor:
    """Entries of [outputs, pieces] for pieces [rows, outputs]."""
    return table.T.gather(0, piece)
