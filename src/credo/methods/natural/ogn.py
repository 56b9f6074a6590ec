"""OGN: VOGN's update at the mean, without noise (Osawa et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from credo.core.arguments import Renamed
from credo.core.likelihood import Likelihood
from credo.core.network.selection import Random
from credo.core.optimizers import Rates
from credo.core.prior import Prior, Value
from credo.methods.natural.groups import (
    RENAMED_CURVATURE,
    RENAMED_MOMENTUM,
    RENAMED_TEMPERATURE,
    Curvature,
    Momentum,
    Warmup,
)
from credo.methods.natural.point_estimate import PointEstimate
from credo.methods.natural.vogn import GaussNewton


class OGN(PointEstimate, GaussNewton):
    """Online Gauss-Newton: VOGN's update at the mean, without noise; a point estimate under the same prior.

    Args:
        model: The network.
        data_size: The number of training examples N.
        lr: Learning rate, or rates by parameter name globs.
        prior: The Gaussian prior: an object, its standard deviation or its description; None: N(0, 1).
        prior_precision: Precision δ of a Gaussian prior about zero instead, also by parameter name globs.
        momentum: Weight of the old momentum, a `Momentum`, or a mapping of its fields.
        curvature: Weight of the old curvature, a `Curvature`, or a mapping of its fields.
        damping: Added to the curvature.
        temperature: Factor of the prior's precision, a `Warmup`, or a mapping of its fields.
        random: Which parameters have a prior, as in VOGN.
        likelihood: How outputs are distributed, `"categorical"` by default.
        seed: Start of the random numbers, of which there are none.
    """

    _renamed_arguments: ClassVar[Renamed] = {
        **RENAMED_MOMENTUM,
        **RENAMED_CURVATURE,
        "augmentation": RENAMED_TEMPERATURE["augmentation"],
    }

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        lr: Rates = 1e-2,
        prior: Prior | Mapping[str, Any] | float | None = None,
        prior_precision: Value | None = None,
        momentum: Momentum | Mapping[str, Any] | float = Momentum(),
        curvature: Curvature | Mapping[str, Any] | float = Curvature(),
        damping: float = 0.1,
        temperature: Warmup | Mapping[str, Any] | float = 1.0,
        random: Random = "all",
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        self._set_groups(momentum, curvature, damping, temperature)
        self._make_state(lr, prior, prior_precision, random)
