"""Synchronised BatchNorm: batch statistics over all processes.

torch's SyncBatchNorm runs on GPUs only and replaces the layer. Here the layer object stays and gets another forward; in
a single process, and in eval mode, that is torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from credo.core.distributed.collectives import Communicator

Statistics = tuple[Tensor, Tensor]


class _Synced:
    """Forward of a BatchNorm layer whose batch is split evenly over the processes of `comm`.

    If `seen` is a list, mean and 1/std of the next batch are appended to it.
    """

    comm: Communicator | None = None
    seen: list[Statistics] | None = None

    def forward(self: Any, x: Tensor) -> Tensor:
        """Like BatchNorm's, with the statistics of the global batch in training mode.

        In eval mode without running statistics, each process uses those of its own batch.
        """
        if self.comm is None or self.comm.size == 1 or not self.training:
            plain: Tensor = super().forward(x)  # type: ignore[misc]
            return plain
        self._check_input_dim(x)
        mean, var = shared_moments(x, self.comm)
        count = self.comm.size * x.numel() // x.shape[1]
        if self.track_running_stats and self.running_mean is not None:
            _update_running_(self, mean, var * (count / max(count - 1, 1)))
        statistics = mean, (var + self.eps).rsqrt()
        seen, self.seen = self.seen, None
        if seen is not None:
            seen.append(statistics)
        run: Any = _Normalise.apply
        out: Tensor = run(x, *statistics, self.comm)
        if self.weight is not None:
            out = out * _by_channel(self.weight, x) + _by_channel(self.bias, x)
        return out.to(x.dtype)


class SyncedBatchNorm1d(_Synced, nn.BatchNorm1d):
    """BatchNorm1d with global batch statistics."""


class SyncedBatchNorm2d(_Synced, nn.BatchNorm2d):
    """BatchNorm2d with global batch statistics."""


class SyncedBatchNorm3d(_Synced, nn.BatchNorm3d):
    """BatchNorm3d with global batch statistics."""


SYNCED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SyncedBatchNorm1d,
    nn.BatchNorm2d: SyncedBatchNorm2d,
    nn.BatchNorm3d: SyncedBatchNorm3d,
}


def synchronise_(model: nn.Module, comm: Communicator) -> None:
    """Make all BatchNorm layers of `model` use batch statistics over the processes of `comm`."""
    for module in model.modules():
        if type(module) in SYNCED:
            module.__class__ = SYNCED[type(module)]
        if isinstance(module, _Synced):
            module.comm = comm


def is_synced(layer: nn.Module) -> bool:
    """Whether a layer's batch statistics extend over several processes."""
    return isinstance(layer, _Synced) and layer.comm is not None and layer.comm.size > 1


@torch.no_grad()
def shared_moments(x: Tensor, comm: Communicator) -> Statistics:
    """Mean and variance of each channel of `x` over the batches of all processes."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(0, 1).flatten(1)
    var, mean = torch.var_mean(wide, 1, correction=0)
    means, variances = comm.gather(torch.cat([mean, var])).chunk(2, 1)
    mean = means.mean(0)
    return mean, (variances + (means - mean).square()).mean(0)


class _Normalise(torch.autograd.Function):
    """(x − mean)/std with statistics, and hence gradients, that depend on the inputs of all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, scale: Tensor, comm: Communicator) -> Tensor:
        """(x − mean)·scale; `ctx` keeps `comm` for the reductions of the backward pass."""
        out = (x - _by_channel(mean, x)) * _by_channel(scale, x)
        ctx.save_for_backward(out, scale)
        ctx.comm, ctx.dtype = comm, x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        out, scale = ctx.saved_tensors
        dims = [d for d in range(g.dim()) if d != 1]
        means = torch.cat([g.mean(dims), (g * out).mean(dims)])
        ctx.comm.mean_(means)()
        first, second = (_by_channel(m, g) for m in means.chunk(2))
        return ((g - first - out * second) * _by_channel(scale, g)).to(ctx.dtype), None, None, None


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


@torch.no_grad()
def _update_running_(layer: Any, mean: Tensor, var: Tensor) -> None:
    layer.num_batches_tracked.add_(1)
    momentum = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
    layer.running_var.lerp_(var.to(layer.running_var.dtype), momentum)
