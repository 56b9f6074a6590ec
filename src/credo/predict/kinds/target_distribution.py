"""The distribution of a new target, entry by entry: a mixture of the draws' distributions, or a recalibrated one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from credo.core.held_out.value_map import ResidualMap, normal_cdf, normal_density
from credo.core.likelihood.distribution import cdf_of, is_discrete, quantile_by_bisection

# The CRPS without a closed form is computed between the quantiles of this level and its complement, on either side of
# the target by so many points, or by a sum over the counts between them, if there are no more than so many.
_TAIL = 1e-5
_NODES = 48
_MOST_COUNTS = 2000
# Rows of a mixture of normals are worked on together up to so many numbers, which fit the cache.
_BLOCK = 2**17
# Newton steps of a quantile before every second one is a bisection, and the most of both.
_NEWTON, _MOST_STEPS = 8, 200


class TargetDistribution(Protocol):
    """A distribution for every entry of a prediction's mean."""

    def cdf(self, y: Tensor) -> Tensor:
        """The probability of a target of at most `y`, float64."""

    def quantile(self, level: float) -> Tensor:
        """The smallest values that a target is at most with probability `level`, float64."""

    def crps(self, y: Tensor) -> Tensor:
        """∫ (F − 1{· ≥ y})² of each entry, float64."""


@dataclass(frozen=True)
class NormalMixture:
    """The equal mixture of the draws' normal distributions.

    Attributes:
        mean: What `offsets` are relative to, [n, …].
        offsets: Means of the draws less `mean`, [n, draws, …]; NaN where a row has fewer draws.
        stds: Their standard deviations, [n, draws or 1, …].
    """

    mean: Tensor
    offsets: Tensor
    stds: Tensor

    def cdf(self, y: Tensor) -> Tensor:
        """The mean of the draws' distribution functions."""
        return self._by_rows(_cdf, y.double() - self.mean)

    def quantile(self, level: float) -> Tensor:
        """By Newton's method, safeguarded by bisection between the smallest and the largest quantile of a draw."""
        return self.mean + self._by_rows(_quantile, torch.full(self.mean.shape, level, dtype=torch.double))

    def crps(self, y: Tensor) -> Tensor:
        """In closed form: mean E|X − y| of the draws less half the mean E|X − X′| of their pairs."""
        return self._by_rows(_crps, y.double() - self.mean)

    def _by_rows(self, function: Callable[[Tensor, Tensor, Tensor], Tensor], values: Tensor) -> Tensor:
        """`function` of offsets and stds [entries, draws] and values [entries], a block of rows at a time."""
        draws, shape = self.offsets.shape[1], values.shape
        rows = max(1, _BLOCK * len(self.mean) // max(1, self.offsets.numel()))
        parts = zip(*(each.split(rows) for each in (self.offsets, self.stds, values)), strict=True)
        found = []
        for offsets, stds, at in parts:
            found.append(function(_by_entry(offsets), _by_entry(stds).expand(-1, draws), at.flatten()))
        return torch.cat(found).reshape(shape)


def _by_entry(values: Tensor) -> Tensor:
    """[n, draws, …] as float64 [entries, draws]."""
    return values.double().reshape(*values.shape[:2], -1).transpose(1, 2).flatten(0, 1)


def _cdf(offsets: Tensor, stds: Tensor, y: Tensor) -> Tensor:
    return normal_cdf((y.unsqueeze(-1) - offsets) / stds).nanmean(-1)


def _quantile(offsets: Tensor, stds: Tensor, level: Tensor) -> Tensor:
    """Offsets from the mean that the mixture of each entry is below with probability `level`."""
    standard = torch.special.ndtri(level)
    ends = offsets + standard.unsqueeze(-1) * stds
    low, high = ends.nan_to_num(nan=math.inf).amin(-1), ends.nan_to_num(nan=-math.inf).amax(-1)
    found = torch.where(low <= high, high, torch.nan)  # without any draw there is none
    narrow, width = stds.amin(-1), (offsets.square() + stds.square()).nanmean(-1).sqrt()
    at = torch.maximum(torch.minimum(standard * width, high), low)
    todo = (low < high).nonzero().flatten()
    for step in range(_MOST_STEPS):
        if not len(todo):
            break
        x, std, least = at[todo], stds[todo], narrow[todo]
        z = (x.unsqueeze(-1) - offsets[todo]) / std
        above = normal_cdf(z).nanmean(-1) - level[todo]
        left, right = torch.where(above < 0, x, low[todo]), torch.where(above < 0, high[todo], x)
        newton = x - above / (normal_density(z) / std).nanmean(-1)
        moved, small = (newton - x).abs(), 1e-10 * least + 1e-15 * x.abs()
        is_newton = (newton >= left) & (newton <= right)  # False where it is not a number: the density is 0
        if step > _NEWTON and step % 2:
            is_newton &= moved <= small
        new = torch.where(is_newton, newton, (left + right) / 2)
        found[todo] = torch.where(is_newton, new, right)
        low[todo], high[todo], at[todo] = left, right, new
        todo = todo[~((is_newton & (moved <= small)) | (right - left <= small))]
    return found


def _crps(offsets: Tensor, stds: Tensor, y: Tensor) -> Tensor:
    count = (~offsets.isnan()).sum(-1)
    to_target = _distance(y.unsqueeze(-1) - offsets, stds).nanmean(-1)
    pairs = torch.where(offsets.isnan(), 0.0, stds).sum(-1) / math.sqrt(math.pi)  # of each draw with itself, halved
    variances = stds.square()
    for apart in range(1, offsets.shape[1]):
        std = (variances[:, apart:] + variances[:, :-apart]).sqrt()
        pairs += _distance(offsets[:, apart:] - offsets[:, :-apart], std).nansum(-1)
    return to_target - pairs / count.square()


def _distance(mean: Tensor, std: Tensor) -> Tensor:
    """E|Z| of Z ~ N(mean, std²)."""
    z = mean / std
    return std * (2 * normal_density(z) + z * torch.erf(z / math.sqrt(2)))


@dataclass(frozen=True)
class DistributionMixture:
    """The mixture of the draws' distributions of any kind.

    Attributes:
        members: Distributions of draws, [draws, n, …], and the part of the mixture that each of them is, which
            broadcasts with them.
        mean: Of the mixture, [n, …].
        std: Of the mixture.
        shift: What the targets are less than those of the distributions times `scale`; 0 if they are the same.
        scale: Of the targets.
    """

    members: Sequence[tuple[Distribution, Tensor]]
    mean: Tensor
    std: Tensor
    shift: Tensor | float = 0.0
    scale: Tensor | float = 1.0

    @property
    def is_discrete(self) -> bool:
        """Whether targets are counts."""
        return is_discrete(self.members[0][0])

    def cdf(self, y: Tensor) -> Tensor:
        """The mean of the draws' distribution functions."""
        value = (y.double() - self.shift) / self.scale
        found = torch.zeros(self.mean.shape, dtype=torch.double)
        for made, part in self.members:
            found += (part * torch.nan_to_num(cdf_of(made, value))).sum(0)
        return found

    def quantile(self, level: float) -> Tensor:
        """By bisection; exact whole numbers of counts."""
        want = torch.full(self.mean.shape, level, dtype=torch.double)
        width = torch.nan_to_num(self.std.double(), nan=1.0, posinf=1.0).clamp_min(1e-12)
        return quantile_by_bisection(self.cdf, want, self.mean.double(), width, self.is_discrete)

    def crps(self, y: Tensor) -> Tensor:
        """By quadrature between the outermost quantiles and the target, or by a sum over counts."""
        y = y.double()
        low, high = torch.minimum(self.quantile(_TAIL), y), torch.maximum(self.quantile(1 - _TAIL), y)
        total = torch.zeros_like(y)
        if self.is_discrete and float((high - low).max()) <= _MOST_COUNTS:
            for step in range(int((high - low).max()) + 1):
                at = low + step
                found = (self.cdf(at) - (at >= y).double()).square()
                total += torch.where(at <= high, found, 0.0)
            return total
        for node, weight in zip(*np.polynomial.legendre.leggauss(_NODES), strict=True):
            for left, right, below in ((low, y, True), (y, high, False)):
                found = self.cdf(left + (right - left) * (float(node) + 1) / 2)
                total += float(weight) / 2 * (right - left) * (found if below else 1 - found).square()
        return total


@dataclass(frozen=True)
class Recalibrated:
    """The distribution that `credo.recalibrate` found of the residuals, around each mean and as wide as each std.

    Attributes:
        mean: Of the distribution, [n, …].
        std: Of the distribution.
        residuals: The distribution of the residuals.
    """

    mean: Tensor
    std: Tensor
    residuals: ResidualMap

    def cdf(self, y: Tensor) -> Tensor:
        """That of the residuals."""
        return self.residuals.cdf(self._residuals(y)).reshape(self.mean.shape)

    def quantile(self, level: float) -> Tensor:
        """That of the residuals, scaled."""
        standard = (self.residuals.quantile(level) - self.residuals.mean) / self.residuals.std
        return self.mean + self.std.double() * standard.reshape(self.mean.shape[1:])

    def crps(self, y: Tensor) -> Tensor:
        """In closed form."""
        widths = self.std.double().reshape(len(self.mean), -1) / self.residuals.std
        return (widths * self.residuals.crps(self._residuals(y))).reshape(self.mean.shape)

    def _residuals(self, y: Tensor) -> Tensor:
        z = ((y.double() - self.mean) / self.std).reshape(len(self.mean), -1)
        return z * self.residuals.std + self.residuals.mean
