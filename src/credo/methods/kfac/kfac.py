"""K-FAC: natural gradients with a Kronecker product of two small matrices as each layer's curvature.

With a layer's weight and bias as one matrix W, A = E[a aᵀ] of its inputs and G = E[g gᵀ] of single examples' gradients
by its outputs, a step is W ← W − lr·G⁻¹ m A⁻¹, m the momentum of the gradient, both matrices damped (Martens and Grosse
2015; for convolutions Grosse and Martens 2016).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from credo.core.arguments import Renamed
from credo.core.likelihood import Likelihood
from credo.core.network.selection import Random
from credo.core.optimizers import Rates
from credo.core.prior import Prior, Value
from credo.methods.kfac.groups import RENAMED, KroneckerCurvature
from credo.methods.kfac.stepper import KroneckerStepper
from credo.methods.natural.groups import Momentum, Warmup
from credo.methods.natural.point_estimate import PointEstimate


class KFAC(PointEstimate, KroneckerStepper):
    """K-FAC: NoisyKFAC's update at the mean, without noise; a point estimate under the same prior.

    Args:
        model: The network.
        data_size: The number of training examples N.
        lr: Learning rate, or rates by parameter name globs.
        prior: The Gaussian prior: an object, its standard deviation or its description; None: N(0, 1).
        prior_precision: Precision δ of a Gaussian prior about zero instead, also by parameter name globs.
        momentum: Weight of the old momentum, a `Momentum`, or a mapping of its fields.
        curvature: Weight of the old factors, a `KroneckerCurvature`, or a mapping of its fields.
        damping: Added to the factors.
        clip: Bound on about twice the KL between a step's old and new predictions; None: no bound.
        temperature: Factor of the prior's precision, a `Warmup`, or a mapping of its fields.
        random: Which parameters have a prior, as in NoisyKFAC.
        likelihood: How outputs are distributed, `"categorical"` by default.
        seed: Start of the random numbers, for `fisher="sampled"` only.
    """

    _renamed_arguments: ClassVar[Renamed] = RENAMED

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        lr: Rates = 3e-3,
        prior: Prior | Mapping[str, Any] | float | None = None,
        prior_precision: Value | None = None,
        momentum: Momentum | Mapping[str, Any] | float = Momentum(),
        curvature: KroneckerCurvature | Mapping[str, Any] | float = KroneckerCurvature(),
        damping: float = 1e-3,
        clip: float | None = 1e-2,
        temperature: Warmup | Mapping[str, Any] | float = 1.0,
        random: Random = "all",
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        self._set_groups(momentum, curvature, damping, clip, temperature)
        self._make_state(lr, prior, prior_precision, random)
