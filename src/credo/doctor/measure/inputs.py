"""Scale of the inputs that reach the first layer with weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.network.inputs import run_network
from credo.core.posterior import Posterior
from credo.doctor.no_side_effects import without_side_effects
from credo.doctor.subset import Subset

# Layers whose outputs grow with their inputs, and the axis of the inputs' channels.
_CHANNELS: dict[type[nn.Module], int] = {
    nn.Linear: -1,
    nn.Conv1d: -2,
    nn.Conv2d: -3,
    nn.Conv3d: -4,
    nn.RNN: -1,
    nn.LSTM: -1,
    nn.GRU: -1,
}


@dataclass(frozen=True)
class InputScale:
    """Inputs of `layer`, the first with weights: root mean squares over channels of their means and of their stds."""

    layer: str
    mean: float
    std: float


@torch.no_grad()
def input_scale(posterior: Posterior, subset: Subset, *, seed: int = 0) -> InputScale | None:
    """Measure in one pass of the first part of `posterior`, in eval mode.

    None if the first layer with weights normalises or embeds its inputs itself, or is of an unknown type.

    Args:
        posterior: A snapshot.
        subset: Training data.
        seed: Seed of dropout in the pass.
    """
    found: list[tuple[str, nn.Module, Any]] = []
    model = posterior.parts[0].model
    with without_side_effects(posterior, seed):
        handles = [
            module.register_forward_pre_hook(lambda layer, inputs, path=path: found.append((path, layer, inputs)))
            for path, module in model.named_modules()
            if module._parameters
        ]
        try:
            run_network(model, subset.x.to(posterior.device))
        finally:
            for handle in handles:
                handle.remove()
    if not found:
        return None
    path, layer, inputs = found[0]
    channel = next((axis for kind, axis in _CHANNELS.items() if isinstance(layer, kind)), None)
    x = inputs[0] if inputs else None
    if channel is None or not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    values = x.double().movedim(channel, 0).flatten(1)
    std, mean = torch.std_mean(values, dim=1, correction=0)
    return InputScale(path, *(math.sqrt(float(part.square().mean())) for part in (mean, std)))
