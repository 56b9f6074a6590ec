"""Pruning masks by parameter name, and as one vector over all parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from credo.core.errors import unknown


def masks_by_name(model: nn.Module, kept: Tensor | None) -> dict[str, Tensor]:
    """Masks of the parameters' shapes from one vector; all True without one."""
    parameters = dict(model.named_parameters())
    sizes = [p.numel() for p in parameters.values()]
    if kept is None:
        return {name: torch.ones_like(p, dtype=torch.bool) for name, p in parameters.items()}
    if kept.dtype is not torch.bool or kept.shape != (sum(sizes),):
        raise ValueError(f"{list(kept.shape)} marks of {kept.dtype} cannot say which of {sum(sizes)} weights are kept.")
    pieces = zip(parameters.items(), kept.split(sizes), strict=True)
    return {name: piece.view(p.shape) for (name, p), piece in pieces}


def joined_masks(model: nn.Module, masks: Mapping[str, Tensor], before: Tensor | None) -> Tensor:
    """One mask over all parameters: parameters without a mask stay, what was pruned before stays pruned.

    Args:
        model: The network.
        masks: Masks by parameter name.
        before: The mask so far.
    """
    marks = {name: mask.clone() for name, mask in masks_by_name(model, before).items()}
    for name, mask in masks.items():
        if name not in marks:
            raise ValueError(unknown("parameter", name, marks))
        if mask.dtype is not torch.bool or mask.shape != marks[name].shape:
            given = f"{list(mask.shape)} of {mask.dtype}"
            raise ValueError(f"The mask of {name} must be {list(marks[name].shape)} of torch.bool; got {given}.")
        marks[name] &= mask.to(marks[name].device)
    return torch.cat([mask.reshape(-1) for mask in marks.values()])


@torch.no_grad()
def zero_outside_(model: nn.Module, kept: Tensor) -> None:
    """Set all weights to zero where the mask is False."""
    masks = masks_by_name(model, kept)
    for name, parameter in model.named_parameters():
        parameter.masked_fill_(~masks[name].to(parameter.device), 0.0)
