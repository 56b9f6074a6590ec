"""Pruning scores of weights and units, and masks from scores. Pure functions of tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from credo.core.errors import unknown

SCOPES = ("global", "layer")


def signal_to_noise(mean: Tensor, std: Tensor) -> Tensor:
    """|mean|/std of each weight (Graves 2011; Blundell et al. 2015): 0 if the mean is, infinite without noise."""
    return torch.where(mean == 0, torch.zeros_like(mean), mean.abs() / std)


def unit_norms(tensors: list[Tensor]) -> Tensor:
    """Root mean square over all entries of each unit, the first dimension of every tensor."""
    rows = torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors], dim=1)
    return rows.square().mean(dim=1).sqrt()


def lowest(scores: Tensor, count: int) -> Tensor:
    """Mask of the `count` smallest entries, in the shape of `scores`; ties are broken by order."""
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    mask[scores.reshape(-1).argsort(stable=True)[:count]] = True
    return mask.view(scores.shape)


def keep_highest(scores: Mapping[str, Tensor], rate: float, *, scope: str = "global") -> dict[str, Tensor]:
    """Masks that are False for the fraction `rate` of smallest `scores`; `scope` is `"global"` or each `"layer"`."""
    if scope not in SCOPES:
        raise ValueError(unknown("scope", scope, SCOPES))
    if not 0 <= rate < 1:
        raise ValueError(f"rate={rate} must be a fraction of the weights, from 0 to below 1.")
    if scope == "layer":
        return {name: ~lowest(score, round(rate * score.numel())) for name, score in scores.items()}
    together = torch.cat([score.reshape(-1) for score in scores.values()])
    pruned = lowest(together, round(rate * len(together))).split([score.numel() for score in scores.values()])
    return {name: ~mask.view(score.shape) for (name, score), mask in zip(scores.items(), pruned, strict=True)}


def keep_above(scores: Mapping[str, Tensor], threshold: float) -> dict[str, Tensor]:
    """Masks that are False where a score is below the threshold."""
    if not threshold >= 0:
        raise ValueError(f"threshold={threshold} must not be negative: scores are absolute values.")
    masks = {name: score >= threshold for name, score in scores.items()}
    if not any(bool(mask.any()) for mask in masks.values()):
        largest = max(float(score.max()) for score in scores.values())
        raise ValueError(f"threshold={threshold} would prune everything: the largest score is {largest:.4g}.")
    return masks
