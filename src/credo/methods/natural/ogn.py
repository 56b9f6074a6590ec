"""OGN: VOGN's update at the mean, without noise (Osawa et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from credo.core.likelihood import Likelihood
from credo.core.network.selection import Random
from credo.core.prior import Prior, Value
from credo.methods.natural.at_mean import AtMean
from credo.methods.natural.vogn import VOGN


class OGN(AtMean):
    """Online Gauss-Newton: VOGN's update at the mean, without noise; a point estimate under the same prior.

    Options are VOGN's, but for those of its noise (`draws`, `curvature_init`, `paper_tau`).
    """

    _noise_options = ("draws", "noise", "curvature_init", "paper_tau", "temperature_start", "warmup_steps")

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
        super().__init__(model, data_size=data_size, seed=seed)
        self._run_by(
            VOGN(
                model,
                data_size=data_size,
                lr=lr,
                prior_precision=prior_precision,
                prior=prior,
                momentum=momentum,
                averaged=averaged,
                curvature_decay=curvature_decay,
                damping=damping,
                temperature=temperature,
                augmentation=augmentation,
                momentum_correction=momentum_correction,
                random=random,
                likelihood=likelihood,
                seed=seed,
            )
        )
