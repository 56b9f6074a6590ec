"""Warn of targets in units that a network does not reach: rates, priors and first noise suit a spread near 1."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from credo.core.errors import DataWarning
from credo.core.likelihood.base import Likelihood
from credo.core.likelihood.gaussian import GaussianNoise
from credo.core.likelihood.quantiles import Quantiles
from credo.core.likelihood.values import MixtureDensity, StudentT
from credo.core.support.user_warnings import warn

# Likelihoods whose outputs are in the units of the targets.
SAME_UNITS = (GaussianNoise, StudentT, MixtureDensity, Quantiles)
# Defaults learn targets with a mean up to about 8 and a standard deviation from 0.05 to 20, and fail beyond: measured
# on a linear function of eight inputs, 200 steps of four methods.
LARGEST_MEAN = 8.0
STD = (0.05, 20.0)
# A network whose outputs are within this factor of the targets scales them itself, or is trained.
_FACTOR = 10.0
_FEWEST_ROWS = 8
ADVICE = (
    "Let the network scale its outputs, model = credo.models.normalized(model, inputs, targets), so that predictions "
    "stay in the targets' units; or train on (y - mean) / std."
)


class TargetScale(NamedTuple):
    """Of the column of targets that is furthest from mean 0 and standard deviation 1."""

    mean: float
    std: float

    @property
    def is_unusual(self) -> bool:
        """Whether the defaults are not made for such targets; a constant column is left to others."""
        return abs(self.mean) > LARGEST_MEAN or self.std > STD[1] or (0 < self.std < STD[0] and self.size < STD[0])

    @property
    def size(self) -> float:
        """Root mean square of the targets."""
        return math.hypot(self.mean, self.std)


@torch.no_grad()
def target_scale(likelihood: Likelihood, y: Tensor | None) -> TargetScale | None:
    """Mean and standard deviation of the least usual column of real targets; None for others, or too few rows.

    Args:
        likelihood: What the targets follow.
        y: Targets of a batch.
    """
    if not isinstance(likelihood, SAME_UNITS) or y is None or not y.is_floating_point() or len(y) < _FEWEST_ROWS:
        return None
    std, mean = torch.std_mean(y.detach().double().reshape(len(y), -1), dim=0, correction=0)
    found = [TargetScale(float(m), float(s)) for m, s in zip(mean, std, strict=True) if math.isfinite(float(m + s))]
    return max(found, key=lambda each: abs(math.log(each.size or 1.0)), default=None)


def warn_of_target_scale(likelihood: Likelihood, outputs: Tensor, y: Tensor | None) -> None:
    """Warn before the first step if the targets are far from where the network's outputs are.

    Args:
        likelihood: What the targets follow.
        outputs: Of the first batch.
        y: Its targets.
    """
    found = target_scale(likelihood, y)
    if found is None or not found.is_unusual:
        return
    reached = float(outputs.detach().double().square().mean().sqrt())
    if math.isfinite(reached) and not reached * _FACTOR < found.size and not found.size * _FACTOR < reached:
        return
    warn(
        f"The targets have mean {found.mean:.3g} and standard deviation {found.std:.3g}, the outputs of the network "
        f"are about {reached:.2g} in size, and learning rates, priors and first noise are made for targets near mean 0 "
        f"and standard deviation 1: training may not get there. {ADVICE}",
        DataWarning,
    )
