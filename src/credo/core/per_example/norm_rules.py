"""Per-example gradients of normalisation layers: Σ over positions of (output gradient) · (normalised input)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.distributed.sync_batchnorm import SYNCED, is_synced
from credo.core.kernels.common import Sums
from credo.core.kernels.norm_squares import norm_back, usable
from credo.core.per_example.layer_rules import ExampleGradients, Fused, positions_before, positions_behind


def norm(layer: nn.Module) -> ExampleGradients:
    """Affine parameters per channel in dimension 1, or for the trailing dimensions.

    BatchNorm in training couples examples through the batch's statistics. Here, as usual (Osawa et al. 2019), a
    gradient counts as the example's at whose output it arrives.
    """
    normalise, trailing = NORMALISE[type(layer)](layer)
    total = positions_behind if trailing is None else partial(positions_before, trailing=trailing)
    return ExampleGradients(
        dims=2 if trailing is None else 1 + trailing,
        features=normalise,
        weight=lambda a, g: total(a * g),
        weight_squares=lambda a, g: total(a.mul_(g)).square().sum(0),  # in place: the features are not used again
        bias=total,
        fused=_fused_batch_norm(layer) if _is_alone(layer) else None,
    )


def _is_alone(layer: nn.Module) -> bool:
    return isinstance(layer, nn.modules.batchnorm._BatchNorm) and not is_synced(layer)


def _fused_batch_norm(layer: Any) -> Fused:
    statistics = None if _by_batch(layer) else (layer.running_mean, layer.running_var)
    eps: float = layer.eps

    def backward(
        x: Tensor, weight: Tensor, g: Tensor, *, needs_input: bool, bias: bool, scale: float | None
    ) -> tuple[Tensor | None, Sums | None]:
        """As `Backward`: x, weight, g, needs_input, bias (always summed) and scale."""
        return norm_back(x, g, weight, statistics, eps, needs_input=needs_input, scale=scale or 1.0)

    return Fused(backward, suits=usable)


def _by_batch(layer: Any) -> bool:
    """Whether BatchNorm normalises by the batch's own statistics."""
    return layer.training or layer.running_mean is None


Normalise = tuple[Callable[[Tensor], Tensor], int | None]
"""The layer without its affine part, and how many trailing dimensions that part has (None: it is per channel)."""


def _batch_norm(layer: Any) -> Normalise:
    mean, var, eps = layer.running_mean, layer.running_var, layer.eps
    if _by_batch(layer) and is_synced(layer):
        seen = layer.seen = []  # the call that follows puts its statistics there
        return lambda x: _scaled(x, *seen[0]), None
    if _by_batch(layer):
        return lambda x: F.batch_norm(x, None, None, training=True, momentum=0.0, eps=eps), None
    return lambda x: F.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), momentum=0.0, eps=eps), None


def _scaled(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    shape = (1, -1, *[1] * (x.dim() - 2))
    return (x - mean.view(shape)) * scale.view(shape)


def _instance_norm(layer: Any) -> Normalise:
    mean, var, eps = layer.running_mean, layer.running_var, layer.eps
    if layer.training or not layer.track_running_stats:
        return lambda x: F.instance_norm(x, momentum=0.0, eps=eps), None
    return lambda x: F.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), momentum=0.0, eps=eps), None


def _group_norm(layer: Any) -> Normalise:
    return lambda x: F.group_norm(x, layer.num_groups, eps=layer.eps), None


def _layer_norm(layer: Any) -> Normalise:
    return lambda x: F.layer_norm(x, layer.normalized_shape, eps=layer.eps), len(layer.normalized_shape)


def _rms_norm(layer: Any) -> Normalise:
    return lambda x: F.rms_norm(x, layer.normalized_shape, eps=layer.eps), len(layer.normalized_shape)


NORMALISE: dict[type[nn.Module], Callable[[Any], Normalise]] = {
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
    **dict.fromkeys(SYNCED.values(), _batch_norm),
    nn.InstanceNorm1d: _instance_norm,
    nn.InstanceNorm2d: _instance_norm,
    nn.InstanceNorm3d: _instance_norm,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
}
