"""One update of natural-gradient methods: means as they are in the network, momentum and curvature as flat vectors.

It is, entry by entry, with pull = shift·(mean − prior mean),

    momentum  ← keep·momentum + take·(g + pull)                    (the pull beside it where it is not coupled)
    curvature ← decay·curvature + renew·h + ½·renew²·(curvature − h)²/(curvature + shift)   (the last if corrected)
    mean      ← mean − lr·clip(debias·momentum / (curvature + shift + damping)),

g and h being the gathered gradient and curvature. VOGN and IVON are this with other g, h and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from credo.core.kernels import flat
from credo.core.network.flat_layout import Layout
from credo.core.optimizer_step import is_finite


@dataclass(frozen=True)
class Update:
    """The numbers of an update; `lr`, `keep`, `shift`, `prior_mean`, `prior_precision` may be vectors."""

    lr: float | Tensor
    keep: float | Tensor
    take: float
    decay: float
    renew: float
    shift: float | Tensor = 0.0
    damping: float = 0.0
    prior_mean: float | Tensor = 0.0
    prior_precision: float | Tensor = 0.0
    debias: float = 1.0
    clip: float = math.inf
    gradient_scale: float = 1.0
    curvature_scale: float = 1.0
    correction: float = 0.0
    coupled: int = 1
    variance: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether all are numbers, as the compiled update takes them."""
        return not any(isinstance(value, Tensor) for value in vars(self).values())


class Part:
    """Some of the network's parameters, behind one another, with their slices of momentum and curvature."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        momentum: Tensor,
        curvature: Tensor,
        layout: Layout | None = None,
    ) -> None:
        self.parameters = parameters
        self.tensors = [p.detach() for p in parameters.values()]
        self.layout = Layout(parameters) if layout is None else layout
        self.momentum, self.curvature = momentum, curvature

    def is_fused(self, update: Update, *gathered: Mapping[str, Tensor]) -> bool:
        """Whether the compiled passes cover this update."""
        given = [one[name] for one in gathered for name in self.parameters]
        return update.is_plain and flat.fused([*self.tensors, *given], self.momentum, self.curvature)

    def inspect(
        self, update: Update, gradients: Mapping[str, Tensor], curvatures: Mapping[str, Tensor]
    ) -> tuple[float, float]:
        """KL(q ‖ p) before the update, and the squared norm of what was gathered.

        The norm is not finite where something gathered is not, or where a corrected curvature would not stay so.
        """
        if not self.parameters:
            return 0.0, 0.0
        if self.is_fused(update, gradients, curvatures):
            return self._fused(update, gradients, curvatures, dry=True)
        squares = self._squares(gradients) + self._squares(curvatures)
        if update.correction and not is_finite(self._renewed_(self.curvature.clone(), update, curvatures)):
            squares = math.nan
        return self._kl(update) if update.variance else 0.0, squares

    def _kl(self, update: Update) -> float:
        inverse = self.curvature.add(update.shift + update.damping).div_(update.variance * update.prior_precision)
        offset = self._flat(self.parameters)
        if isinstance(update.prior_mean, Tensor) or update.prior_mean:
            offset -= update.prior_mean
        # 1/r − 1 + log r for a weight, 1/r being the share of the prior's variance that q has; no term is negative, so
        # that sums in single precision are as exact as their terms.
        spread = inverse.reciprocal().add_(inverse.log_()).sub_(1).sum()
        return 0.5 * float(spread + (offset.square_().mul_(update.prior_precision)).sum())

    def _squares(self, tensors: Mapping[str, Tensor]) -> float:
        listed = [tensors[name] for name in self.parameters]
        total = math.fsum(norm * norm for norm in torch.stack(torch._foreach_norm(listed)).tolist())
        # Finite ones of which the square is not are rare; in double it is.
        return total if math.isfinite(total) else sum(float(t.double().square().sum()) for t in listed)

    def apply_(self, update: Update, gradients: Mapping[str, Tensor], curvatures: Mapping[str, Tensor]) -> None:
        """One update."""
        if not self.parameters:
            return
        if self.is_fused(update, gradients, curvatures):
            self._fused(update, gradients, curvatures, dry=False)
            return
        mean, s, m = self._flat(self.parameters), self.curvature, self.momentum
        pull = (mean - update.prior_mean).mul_(update.shift)
        self._renewed_(s, update, curvatures)
        m.mul_(update.keep).add_(self._flat(gradients), alpha=update.take * update.gradient_scale)
        if update.coupled:
            m.add_(pull, alpha=update.take)
        direction = torch.mul(m, update.debias) if update.coupled else pull.add_(m, alpha=update.debias)
        direction.div_(s.add(update.shift + update.damping).clamp_min_(1e-30))
        if math.isfinite(update.clip):
            direction.clamp_(-update.clip, update.clip)
        self._write(mean.sub_(direction.mul_(update.lr)))

    def _renewed_(self, s: Tensor, update: Update, curvatures: Mapping[str, Tensor]) -> Tensor:
        h = self._flat(curvatures)
        if not update.correction:
            return s.mul_(update.decay).add_(h, alpha=update.renew * update.curvature_scale)
        h = h * update.curvature_scale
        change = update.renew * (s - h)  # squared only after the division: a square of large ones overflows
        second = update.correction * 0.5 * change * (change / (s + update.shift).clamp_min(1e-30))
        return s.mul_(update.decay).add_(h, alpha=update.renew).add_(second)

    def _fused(
        self, update: Update, gradients: Mapping[str, Tensor], curvatures: Mapping[str, Tensor], *, dry: bool
    ) -> tuple[float, float]:
        means, found, new = (self.layout.pieces(tensors) for tensors in (self.parameters, gradients, curvatures))
        lists = flat.TensorList(means), flat.TensorList(found), flat.TensorList(new)
        sums = flat.update_(*lists, self.momentum, self.curvature, vars(update), dry=dry)
        if not (dry or self.layout.is_whole):  # else the means themselves were updated
            self._write(means[0])
        return sums

    def _write(self, means: Tensor) -> None:
        for tensor, piece in zip(self.tensors, self.layout.split(means).values(), strict=True):
            tensor.copy_(piece)

    def _flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return self.layout.flatten({n: tensors[n].detach() for n in self.parameters}).to(self.momentum.dtype)
