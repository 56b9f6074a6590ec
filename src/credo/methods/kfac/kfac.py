"""K-FAC: natural gradients with a Kronecker product of two small matrices as each layer's curvature.

With a layer's weight and bias as one matrix W, A = E[a aᵀ] of its inputs and G = E[g gᵀ] of single examples' gradients
by its outputs, a step is W ← W − lr·G⁻¹ m A⁻¹, m the momentum of the gradient, both matrices damped (Martens and Grosse
2015; for convolutions Grosse and Martens 2016).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from credo.core.likelihood import Likelihood
from credo.core.network.selection import Random
from credo.core.prior import Prior, Value
from credo.methods.kfac.noisy_kfac import KroneckerStepper
from credo.methods.kfac.validate import check_options
from credo.methods.natural.point_estimate import PointEstimate


class KFAC(PointEstimate, KroneckerStepper):
    """K-FAC: NoisyKFAC's update at the mean, without noise; a point estimate under the same prior.

    Args:
        model: The network.
        data_size: The number of training examples N.
        lr: Learning rate, or rates by parameter name globs.
        prior_precision: Precision δ of the Gaussian prior about zero, also by parameter name globs.
        prior: The Gaussian prior instead: an object, its standard deviation or its description. Default: N(0, 1).
        momentum: Weight of the old momentum.
        curvature_decay: Weight of the old factors, after the first ones.
        damping: Added to the factors.
        clip: Bound on about twice the KL between a step's old and new predictions; None: no bound.
        factor_every: Steps between new factors.
        inverse_every: Steps between new inverses; the first as many steps make one each.
        fisher: `"empirical"`, or `"sampled"`: labels drawn from the network's outputs by `likelihood`, which must be
            that of the loss, at the cost of a second pass.
        diagonal: Names or globs of parameters that get a diagonal instead of factors.
        temperature: Factor of the prior's precision.
        augmentation: Factor of N that data augmentation is worth.
        momentum_correction: Rescale the momentum when the learning rate changes.
        random: Which parameters have a prior, as in NoisyKFAC.
        likelihood: How outputs are distributed, `"categorical"` by default.
        seed: Start of the random numbers, for `fisher="sampled"` only.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        lr: float | Mapping[str, float] = 3e-3,
        prior_precision: Value | None = None,
        prior: Prior | Mapping[str, Any] | float | None = None,
        momentum: float = 0.9,
        curvature_decay: float = 0.95,
        damping: float = 1e-3,
        clip: float | None = 1e-2,
        factor_every: int = 1,
        inverse_every: int = 10,
        fisher: str = "empirical",
        diagonal: str | Sequence[str] = (),
        temperature: float = 1.0,
        augmentation: float = 1.0,
        momentum_correction: bool = True,
        random: Random = "all",
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        self.arguments["diagonal"] = [diagonal] if isinstance(diagonal, str) else list(diagonal)
        check_options(self.arguments, self.likelihood)
        self._make_state(lr, prior, prior_precision, random)
