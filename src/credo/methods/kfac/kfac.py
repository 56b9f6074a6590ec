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
from credo.methods.kfac.noisy_kfac import NoisyKFAC
from credo.methods.natural.at_mean import AtMean


class KFAC(AtMean):
    """K-FAC: NoisyKFAC's update at the mean, without noise; a point estimate under the same prior.

    Options are NoisyKFAC's, but for those of its noise (`draws`, `temperature_start`, `warmup_steps`). The seed matters
    for `fisher="sampled"` only.
    """

    _noise_options = ("draws", "temperature_start", "warmup_steps")

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
        super().__init__(model, data_size=data_size, seed=seed)
        self._run_by(
            NoisyKFAC(
                model,
                data_size=data_size,
                lr=lr,
                prior_precision=prior_precision,
                prior=prior,
                momentum=momentum,
                curvature_decay=curvature_decay,
                damping=damping,
                clip=clip,
                factor_every=factor_every,
                inverse_every=inverse_every,
                fisher=fisher,
                diagonal=diagonal,
                temperature=temperature,
                augmentation=augmentation,
                momentum_correction=momentum_correction,
                random=random,
                likelihood=likelihood,
                seed=seed,
            )
        )
