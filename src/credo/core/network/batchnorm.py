"""The running statistics of normalisation layers, which passes change besides what training changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.network.inputs import AnyInputs, run_network, split_batch
from credo.core.network.skeleton import private_network
from credo.core.network.substitute import Draw, substituted
from credo.core.support.keywords import checked_keywords

_TRACKING = nn.modules.batchnorm._NormBase
_STATISTICS = ("running_mean", "running_var")


def tracking_layers(model: nn.Module) -> list[nn.modules.batchnorm._NormBase]:
    """The layers with running statistics."""
    return [m for m in model.modules() if isinstance(m, _TRACKING) and m.running_mean is not None]


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


@checked_keywords()
@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """While open, passes do not update running statistics; what a pass computes does not change.

    For extra passes in training (further draws, adversarial ascent), which would otherwise count as data.
    """
    training = [m for m in tracking_layers(model) if m.training]
    batch = [m for m in training if _is_batch_norm(m) and m.track_running_stats]
    instance = [m for m in training if not _is_batch_norm(m)]
    try:
        for module in batch:
            module.track_running_stats = False
        for module in instance:
            # Instance norm updates whatever statistics it finds (momentum 0 would still round them): plain attributes
            # of these names hide them.
            module.__dict__.update(dict.fromkeys(_STATISTICS))
        yield
    finally:
        for module in batch:
            module.track_running_stats = True
        for module in instance:
            for key in _STATISTICS:
                module.__dict__.pop(key, None)


@contextmanager
def statistics_kept_on_error(model: nn.Module) -> Iterator[None]:
    """Restore running statistics if what is inside fails: a NaN batch must not stay in them."""
    kept = [(b, b.clone()) for m in tracking_layers(model) if m.training for b in m._buffers.values() if b is not None]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
        raise


@checked_keywords()
@torch.no_grad()
def refresh_statistics(
    model: nn.Module, batches: Iterable[Any], *, draw: Draw | None = None, most: int | None = None
) -> None:
    """Re-estimate running statistics as the plain average over batches. Raises ValueError if there is none.

    Args:
        model: The network.
        batches: Batches as `credo.predict` takes them; of longer tuples, the first entry is the input.
        draw: Weights to run it with, by name; None: its own.
        most: How many batches to use at most.
    """
    if not tracking_layers(model):
        return
    device = next((p.device for p in model.parameters()), None)
    net = model if draw is None else private_network(model)
    modules = tracking_layers(net)
    before = [(m, m.momentum, m.training) for m in modules]
    count = 0
    try:
        # Inside: the draw of an ensemble's member holds its own statistics, which are then the ones to estimate.
        with substituted(net, draw or {}):
            for module in modules:
                module.reset_running_stats()
                module.train()
            for batch in batches:
                for module in modules:
                    # None is the plain average for batch norm, but no update at all for instance norm.
                    module.momentum = None if _is_batch_norm(module) else 1 / (count + 1)
                run_network(net, _inputs(batch, device))
                count += 1
                if most is not None and count >= most:
                    break
    finally:
        for module, momentum, training in before:
            module.momentum = momentum
            module.train(training)
    if count == 0:
        raise ValueError("refresh_statistics got no batch: the running statistics are now those of a new layer.")


@torch.no_grad()
def statistics_of(model: nn.Module, batches: Iterable[Any], draw: Draw) -> dict[str, Tensor]:
    """Running statistics for one draw, by buffer name, as `refresh_statistics` estimates them; the model's own stay.

    Args:
        model: The network.
        batches: Tensors, or tuples whose first entry is the input.
        draw: Weights to run it with, by name.
    """
    tracked = {id(b) for layer in tracking_layers(model) for b in layer._buffers.values()}
    own = {name: buffer.clone() for name, buffer in model.named_buffers() if id(buffer) in tracked}
    refresh_statistics(model, batches, draw={**draw, **own})
    return own


def _inputs(batch: Any, device: torch.device | None) -> AnyInputs:
    several = isinstance(batch, tuple | list) and len(batch) > 2
    inputs, _ = split_batch(batch[:1] if several else batch)
    return inputs if device is None else inputs.to(device)
