"""Running statistics of normalisation layers: when they change, and how to estimate them anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.weights import Draw, substituted

_TRACKING = nn.modules.batchnorm._NormBase


def _tracking(model: nn.Module) -> list[nn.modules.batchnorm._NormBase]:
    return [m for m in model.modules() if isinstance(m, _TRACKING) and m.running_mean is not None]


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Passes inside leave running statistics alone; what a pass computes does not change.

    For inner passes in training (extra draws, adversarial ascent): without it each of them would count as data.
    """
    changed: list[tuple[Any, str, Any]] = []
    try:
        for module in _tracking(model):
            # Batch norm in training reads its statistics only to update them; instance norm always gets them.
            batch = isinstance(module, nn.modules.batchnorm._BatchNorm)
            if batch and not module.training:
                continue
            key, value = ("track_running_stats", False) if batch else ("momentum", 0.0)
            changed.append((module, key, getattr(module, key)))
            setattr(module, key, value)
        yield
    finally:
        for module, key, value in changed:
            setattr(module, key, value)


@torch.no_grad()
def refresh_statistics(
    model: nn.Module, batches: Iterable[Any], *, draw: Draw | None = None, most: int | None = None
) -> None:
    """Estimate running statistics anew as the plain average over `batches`, for the mean or for one draw.

    A batch is a tensor or a tuple whose first entry is the input; `most` limits how many are used.
    """
    modules = _tracking(model)
    if not modules:
        return
    before = [(m, m.momentum, m.training) for m in modules]
    count = 0
    try:
        # Inside: a member of an ensemble brings its own statistics, which are then the ones to estimate.
        with substituted(model, draw or {}):
            for module in modules:
                module.reset_running_stats()
                module.train()
            for batch in batches:
                for module in modules:
                    # None is the plain average for batch norm, but no update at all for instance norm.
                    is_batch = isinstance(module, nn.modules.batchnorm._BatchNorm)
                    module.momentum = None if is_batch else 1 / (count + 1)
                model(_inputs(batch))
                count += 1
                if most is not None and count >= most:
                    break
    finally:
        for module, momentum, training in before:
            module.momentum = momentum
            module.train(training)
    if count == 0:
        raise ValueError("refresh_statistics got no batch: the running statistics are now those of a new layer.")


def _inputs(batch: Any) -> Tensor:
    inputs: Tensor = batch[0] if isinstance(batch, tuple | list) else batch
    return inputs
