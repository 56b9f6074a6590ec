"""Quantiles of a target, learned by the pinball loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.likelihood.base import Likelihood, natural_scale_step_
from credo.core.support.validate import is_number


class Quantiles(Likelihood):
    """Quantile regression: outputs [batch, targets·levels], from which quantiles are made that never cross.

    The first output of a target is its lowest quantile, the others are gaps before a softplus. The loss is the pinball
    loss over a learned scale b: the asymmetric Laplace likelihood of Yu & Moyeed (2001), summed over levels. It makes
    the quantiles consistent, but no distribution of the targets, so predictions are `QuantilePrediction`s: quantiles
    averaged over draws, and how far the draws differ.

    Args:
        levels: Probabilities of the quantiles, increasing, between 0 and 1.
    """

    task = "quantiles"
    kind = "quantiles"

    def __init__(self, levels: Sequence[float] = (0.05, 0.5, 0.95)) -> None:
        super().__init__()
        values = list(levels)
        rising = all(a < b for a, b in pairwise(values))
        if not values or not all(is_number(v) and 0 < v < 1 for v in values) or not rising:
            raise ValueError(f"levels={levels!r:.80} must be increasing numbers between 0 and 1, such as (0.05, 0.95).")
        self.levels = [float(v) for v in values]
        self.log_scale = nn.Parameter(torch.zeros(()))
        self._entries = 0  # of one example's target, as last seen

    @property
    def unlearned(self) -> list[str]:
        """None: the scale weighs the loss, and no prediction depends on it."""
        return []

    def quantiles(self, outputs: Tensor) -> Tensor:
        """Quantiles [..., targets, levels], increasing along the last dimension."""
        count = len(self.levels)
        if outputs.shape[-1] % count:
            raise ValueError(f"Quantiles of {count} levels need {count} outputs per target, got {outputs.shape[-1]}.")
        each = outputs.unflatten(-1, (-1, count))
        return torch.cat([each[..., :1], F.softplus(each[..., 1:])], -1).cumsum(-1)

    def pinball(self, quantiles: Tensor, y: Tensor) -> Tensor:
        """Pinball loss of each quantile, [..., targets, levels].

        Args:
            quantiles: Of one or several draws.
            y: Targets [batch, targets].
        """
        level = quantiles.new_tensor(self.levels)
        error = y.unsqueeze(-1).to(quantiles.dtype) - quantiles
        return torch.maximum(level * error, (level - 1) * error)

    def nll_each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """−log of the asymmetric Laplace densities, summed over targets and levels."""
        found = self.quantiles(outputs)
        if y.shape != found.shape[:-1]:
            raise ValueError(
                f"Targets of shape {list(y.shape)} for quantiles of {list(found.shape[:-1])} values: they must be "
                "equal (broadcasting would silently compare every example with every other)."
            )
        self._entries = y[:1].numel()
        return -self.log_density(found, y).flatten(1).sum(1)

    def log_density(self, quantiles: Tensor, y: Tensor) -> Tensor:
        """log of τ(1 − τ)/b·exp(−pinball/b) for each level τ, [..., targets, levels].

        Args:
            quantiles: Of one or several draws.
            y: Targets [batch, targets].
        """
        level = quantiles.new_tensor(self.levels)
        log_scale = self.log_scale.to(quantiles)
        return (level * (1 - level)).log() - log_scale - self.pinball(quantiles, y) / log_scale.exp()

    @torch.no_grad()
    def start_(self, y: Tensor, average: Callable[[Sequence[Tensor]], object] | None = None) -> None:
        """Start b at a fifth of the targets' standard deviation."""
        spread = [y.double().std() if y.numel() > 1 else torch.ones((), dtype=torch.double, device=y.device)]
        if average is not None:
            average(spread)
        if float(spread[0]) > 0:
            self.log_scale.fill_(math.log(0.2 * float(spread[0])))

    def update_(self, step: int) -> bool:
        """Natural-gradient step on b."""
        return natural_scale_step_(self.log_scale, float(self._entries * len(self.levels)), step)

    def curvature_factors(self, outputs: Tensor) -> Tensor:
        """√(τ(1 − τ))/b for each quantile, by the outputs that it is a sum of; levels count as independent."""
        each = outputs.unflatten(-1, (-1, len(self.levels)))
        gaps = torch.cat([torch.ones_like(each[..., :1]), each[..., 1:].sigmoid()], -1)  # ∂quantile/∂output
        level = outputs.new_tensor(self.levels)
        roots = (level * (1 - level)).sqrt() / self.log_scale.detach().to(outputs).exp()
        count, targets = len(self.levels), gaps.shape[-2]
        lower = torch.tril(torch.ones(count, count, dtype=outputs.dtype, device=outputs.device))
        by_target = roots.unsqueeze(-1) * lower * gaps.unsqueeze(-2)  # [batch, targets, quantile, output]
        eye = torch.eye(targets, dtype=outputs.dtype, device=outputs.device)
        vectors = by_target.unsqueeze(2) * eye.view(1, targets, targets, 1, 1)  # [batch, of, at, quantile, output]
        return vectors.permute(1, 3, 0, 2, 4).reshape(targets * count, *outputs.shape)

    def config(self) -> dict[str, Any]:
        """Kind and levels; b is saved with the tensors."""
        return {"kind": self.kind, "levels": self.levels}
