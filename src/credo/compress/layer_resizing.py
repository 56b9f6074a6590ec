"""Change the sizes of layers in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from credo.compress.structure import LAYERS, NORMS
from credo.core.network.selection import join

_SIZES = {nn.Linear: ("out_features", "in_features"), nn.Conv2d: ("out_channels", "in_channels")}


def resize_(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
    """Replace tensors of linear, convolution and BatchNorm layers by zeros of new shapes, given by name."""
    for path, module in model.named_modules():
        if type(module) not in (*LAYERS, *NORMS):
            continue
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                shape = shapes.get(join(path, key))
                if tensor is not None and shape is not None and list(tensor.shape) != list(shape):
                    # By data, so that the parameter remains the same object.
                    tensor.data = torch.zeros(list(shape), dtype=tensor.dtype, device=tensor.device)
        _set_sizes_(module)


def _set_sizes_(module: nn.Module) -> None:
    if isinstance(module, NORMS):
        known: Tensor | None = module.running_mean if module.weight is None else module.weight
        module.num_features = module.num_features if known is None else len(known)
        return
    weight: Tensor = module.weight  # type: ignore[assignment]
    for name, size in zip(_SIZES[type(module)], weight.shape, strict=False):
        setattr(module, name, size)
