"""OGN: VOGN's update at the mean, without noise (Osawa et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from credo.core.likelihood import Likelihood
from credo.core.network.selection import Random
from credo.core.per_example.plan import PerExamplePlan
from credo.core.prior import Prior, Value
from credo.methods.natural.point_estimate import PointEstimate
from credo.methods.natural.validate import check_augmentation, check_numbers
from credo.methods.natural.vogn import GaussNewton


class OGN(PointEstimate, GaussNewton):
    """Online Gauss-Newton: VOGN's update at the mean, without noise; a point estimate under the same prior.

    Args:
        model: The network.
        data_size: The number of training examples N.
        lr: Learning rate, or rates by parameter name globs.
        prior_precision: Precision δ of the Gaussian prior about zero, also by parameter name globs.
        prior: The Gaussian prior instead: an object, its standard deviation or its description. Default: N(0, 1).
        momentum: Weight of the old momentum.
        averaged: Make the momentum an average (with debiasing) instead of a sum.
        curvature_decay: Weight of the old curvature.
        damping: Added to the curvature.
        temperature: Factor of the prior's precision.
        augmentation: Factor of N that data augmentation is worth.
        momentum_correction: Rescale the momentum when the learning rate changes.
        random: Which parameters have a prior, as in VOGN.
        likelihood: How outputs are distributed, `"categorical"` by default.
        seed: Start of the random numbers, of which there are none.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        lr: float | Mapping[str, float] = 1e-2,
        prior_precision: Value | None = None,
        prior: Prior | Mapping[str, Any] | float | None = None,
        momentum: float = 0.9,
        averaged: bool = False,
        curvature_decay: float = 0.999,
        damping: float = 0.1,
        temperature: float = 1.0,
        augmentation: float = 1.0,
        momentum_correction: bool = True,
        random: Random = "all",
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        check_numbers(momentum=momentum, decay=curvature_decay, damping=damping, draws=1, temperature=temperature)
        check_augmentation(augmentation)
        self.momentum_decay, self.averaged, self.curvature_decay = momentum, averaged, curvature_decay
        self.damping, self.effective_size = damping, data_size * augmentation
        self.final_temperature, self.momentum_correction = temperature, momentum_correction
        self._make_state(lr, prior, prior_precision, random, curvature=0.0, progress=(2,))
        self.has_curvature = False
        self.plan = PerExamplePlan(self._net, self.vector.names, self._aliases)
