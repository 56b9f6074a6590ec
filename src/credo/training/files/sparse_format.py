"""Pruned posteriors in files: the unpruned weights of each parameter, and a mask with one bit per weight."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from credo.core.network.pruning import masks_by_name
from credo.core.posterior import Posterior


def pack(posterior: Posterior, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a state without the zeros of pruned weights."""
    packed = dict(tensors)
    for prefix, part in _parts(posterior):
        if part.kept is None:
            continue
        packed[f"{prefix}kept"] = torch.from_numpy(np.packbits(part.kept.cpu().numpy()))
        for name, mask in part.masks().items():
            key = f"{prefix}model.{name}"
            packed[key] = packed[key][mask.to(packed[key].device)]
    return packed


def unpack_(posterior: Posterior, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the full tensors, and prune the posterior by their masks."""
    whole = dict(tensors)
    for prefix, part in _parts(posterior):
        bits = tensors.get(f"{prefix}kept")
        if bits is None:
            continue
        size = sum(p.numel() for p in part.model.parameters())
        if bits.dtype is not torch.uint8 or bits.shape != (-(-size // 8),):
            raise ValueError(f"{prefix}kept does not fit {size} weights")
        kept = torch.from_numpy(np.unpackbits(bits.numpy(), count=size).astype(bool))
        masks = masks_by_name(part.model, kept)
        part.keep_({name: mask.to(part.device) for name, mask in masks.items()})
        whole[f"{prefix}kept"] = kept
        for name, mask in masks.items():
            whole[f"{prefix}model.{name}"] = _scatter(tensors.get(f"{prefix}model.{name}"), mask, name)
    return whole


def _parts(posterior: Posterior) -> list[tuple[str, Posterior]]:
    """Return this posterior and all inside it, each with the prefix of its tensor names."""
    found = [(path, module) for path, module in posterior.named_modules() if isinstance(module, Posterior)]
    return [(f"{path}." if path else "", part) for path, part in found]


def _scatter(values: Tensor | None, mask: Tensor, name: str) -> Tensor:
    if values is None or values.shape != (int(mask.sum()),):
        raise ValueError(f"{name} has another number of values than its mask has entries")
    return torch.zeros(mask.shape, dtype=values.dtype).masked_scatter_(mask, values)
