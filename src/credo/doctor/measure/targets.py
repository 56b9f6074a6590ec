"""Units of the targets beside those of the network's last layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from credo.core.likelihood.target_scale import TargetScale, target_scale
from credo.core.network.inputs import run_network
from credo.core.posterior import Posterior
from credo.doctor.no_side_effects import without_side_effects
from credo.doctor.subset import Subset


@torch.no_grad()
def unscaled_targets(posterior: Posterior, subset: Subset, *, seed: int = 0) -> TargetScale | None:
    """Mean and standard deviation of targets that the last layer with weights must reach by itself, if unusual.

    None for classes, for targets near mean 0 and standard deviation 1, and for a network that scales its outputs.

    Args:
        posterior: A snapshot.
        subset: Training data.
        seed: Seed of dropout in the pass.
    """
    part = posterior.parts[0]
    found = target_scale(part.likelihood, subset.y)
    if found is None or not found.is_unusual:
        return None
    last: list[Any] = [None]
    with without_side_effects(posterior, seed):
        handles = [
            module.register_forward_hook(lambda _, __, output: last.__setitem__(0, output))
            for module in part.model.modules()
            if module._parameters
        ]
        try:
            outputs = run_network(part.model, subset.x.to(posterior.device))
        finally:
            for handle in handles:
                handle.remove()
    raw = last[0]
    same = (
        isinstance(raw, Tensor) and raw.numel() == outputs.numel() and torch.allclose(raw.flatten(), outputs.flatten())
    )
    return found if same else None
