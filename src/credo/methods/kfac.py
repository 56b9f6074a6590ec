"""K-FAC: natural gradients with a Kronecker product of two small matrices as each layer's curvature.

With a layer's weight and bias as one matrix W, A = E[a aᵀ] of its inputs and G = E[g gᵀ] of single examples' gradients
by its outputs, a step is W ← W − lr·G⁻¹ m A⁻¹, m the momentum of the gradient, both matrices damped (Martens and Grosse
2015; for convolutions Grosse and Martens 2016).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.batchnorm import statistics_kept_on_error
from credo.core.likelihood import Likelihood
from credo.core.posterior import Nll, Posterior, Terms
from credo.core.prior import Prior, Value
from credo.core.weights import Random, parameters_at
from credo.methods.noisy_kfac import NoisyKFAC


class KFAC(Posterior):
    """K-FAC: NoisyKFAC's update at the mean, without noise; a point estimate under the same prior.

    Options are NoisyKFAC's, but for those of its noise (`draws`, `temperature_start`, `warmup_steps`). The seed matters
    for `fisher="sampled"` only.
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
        super().__init__(model, data_size=data_size, seed=seed)
        self.engine = NoisyKFAC(
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
        self.engine.noisy = False
        self._use(self.engine)

    @property
    def is_random(self) -> bool:
        """No: all draws are the same network."""
        return False

    def draw(self) -> dict[str, Tensor]:
        """`{}`: the point estimate."""
        return {}

    def step(self, nll: Nll) -> Terms:
        """One pass at the mean and an update; the penalty is −log p(w)/N up to a constant."""
        with statistics_kept_on_error(self.model), self.engine._gathered.dropped_on_error():
            self.gather(nll)
            return self.update()

    def gather(self, nll: Nll) -> float:
        """One pass whose gradients and factors the next `update` averages in."""
        return self.engine.gather(nll)

    def trial(self) -> AbstractContextManager[nn.Module]:
        """The network, for a forward and backward pass of your own; gathered on a clean exit."""
        return self.engine.trial()

    def update(self) -> Terms:
        """One update from what was gathered since the last."""
        prior, engine, layout = self.engine.prior, self.engine, self.engine.split.random_layout
        with torch.no_grad():
            z = (layout.flatten(parameters_at(self.model, layout.names)) - prior.mean) / prior.std
            penalty = float(0.5 * z.double().square().sum()) * engine.temperature / engine.effective_size
        engine.lr_scale = self.lr_scale
        nll = engine.update().nll
        self.steps += 1
        return Terms(loss=nll + penalty, nll=nll, penalty=penalty)

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        noise = ("draws", "temperature_start", "warmup_steps")
        return {name: value for name, value in self.engine.config().items() if name not in noise}
