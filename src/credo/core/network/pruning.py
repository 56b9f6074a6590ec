"""Pruned posteriors: a mask over the network's parameters outside of which weights are zero, for good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.errors import UnsupportedModelError, unknown


class Prunable(nn.Module):
    """The masks of a posterior. A method whose weights are independent of each other overrides `keep_`.

    The buffer `kept` is the joint mask of all parameters, None before anything was pruned.
    """

    model: nn.Module
    kept: Tensor | None

    def masks(self) -> dict[str, Tensor]:
        """Masks of the weights that are not pruned, by parameter name."""
        return masks_by_name(self.model, self.kept)

    def keep_(self, masks: Mapping[str, Tensor]) -> None:
        """Prune for good: weights are zero in the mean and in every draw where their parameter's mask is False.

        Training continues with the others, and the KL is theirs; what was pruned before stays pruned.

        Args:
            masks: A bool tensor of each parameter's shape, by name; parameters without one are kept as they are.
        """
        raise UnsupportedModelError(
            f"{type(self).__name__} cannot be pruned: that needs weights which are independent of each other, as those "
            "of MAP, BBB, VOGN and IVON are. Of an ensemble, prune the parts."
        )

    def _keep(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Zero the means outside the masks; the masks of all parameters, with what was pruned before."""
        self.kept = joined_masks(self.model, masks, self.kept)
        zero_outside_(self.model, self.kept)
        return self.masks()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        kept = state_dict.get(f"{prefix}kept")
        if kept is not None and self.kept is None:
            self.keep_(masks_by_name(self.model, kept))  # vectors of the posterior get their length by it
        elif kept is not None and not torch.equal(kept, torch.as_tensor(self.kept).to(kept.device)):
            raise ValueError("The state dict has a different pruning mask. Load it into an unpruned posterior.")
        super()._load_from_state_dict(state_dict, prefix, *args)


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
