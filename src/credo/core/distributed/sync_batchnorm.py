"""BatchNorm by the statistics of a batch that several processes share.

Torch's own SyncBatchNorm runs on GPUs only, and is another layer. Here the layer stays the same object and is given
another forward; in one process, and in eval mode, it is torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from credo.core.distributed.collectives import Link

Statistics = tuple[Tensor, Tensor]


class _Synced:
    """The forward of a BatchNorm layer whose batch is spread over the processes of `link`, in equal parts.

    A list in `seen` gets mean and 1/std of the next batch.
    """

    link: Link | None = None
    seen: list[Statistics] | None = None

    def forward(self: Any, x: Tensor) -> Tensor:
        """As BatchNorm's, by the statistics of the whole batch in training mode.

        Without running statistics eval mode takes those of the batch it sees: processes evaluate apart.
        """
        if self.link is None or self.link.size == 1 or not self.training:
            plain: Tensor = super().forward(x)  # type: ignore[misc]
            return plain
        self._check_input_dim(x)
        mean, var = shared_moments(x, self.link)
        count = self.link.size * x.numel() // x.shape[1]
        if self.track_running_stats and self.running_mean is not None:
            _follow_(self, mean, var * (count / max(count - 1, 1)))
        statistics = mean, (var + self.eps).rsqrt()
        seen, self.seen = self.seen, None
        if seen is not None:
            seen.append(statistics)
        run: Any = _Normalise.apply
        out: Tensor = run(x, *statistics, self.link)
        if self.weight is not None:
            out = out * _by_channel(self.weight, x) + _by_channel(self.bias, x)
        return out.to(x.dtype)


class SyncedBatchNorm1d(_Synced, nn.BatchNorm1d):
    """BatchNorm1d of a shared batch."""


class SyncedBatchNorm2d(_Synced, nn.BatchNorm2d):
    """BatchNorm2d of a shared batch."""


class SyncedBatchNorm3d(_Synced, nn.BatchNorm3d):
    """BatchNorm3d of a shared batch."""


SYNCED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SyncedBatchNorm1d,
    nn.BatchNorm2d: SyncedBatchNorm2d,
    nn.BatchNorm3d: SyncedBatchNorm3d,
}


def synchronise_(model: nn.Module, link: Link) -> None:
    """Let all BatchNorm layers below take the statistics of the batch that the processes of `link` share."""
    for module in model.modules():
        if type(module) in SYNCED:
            module.__class__ = SYNCED[type(module)]
        if isinstance(module, _Synced):
            module.link = link


def is_synced(layer: nn.Module) -> bool:
    """Whether a layer's statistics are of more than the batch it sees."""
    return isinstance(layer, _Synced) and layer.link is not None and layer.link.size > 1


@torch.no_grad()
def shared_moments(x: Tensor, link: Link) -> Statistics:
    """Mean and variance of each channel over the batches of all processes."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(0, 1).flatten(1)
    var, mean = torch.var_mean(wide, 1, correction=0)
    means, variances = link.gather(torch.cat([mean, var])).chunk(2, 1)
    mean = means.mean(0)
    return mean, (variances + (means - mean).square()).mean(0)


class _Normalise(torch.autograd.Function):
    """(x − mean)/std, whose statistics depend on the inputs of all processes; so do the gradients of all losses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, scale: Tensor, link: Link) -> Tensor:
        out = (x - _by_channel(mean, x)) * _by_channel(scale, x)
        ctx.save_for_backward(out, scale)
        ctx.link, ctx.dtype = link, x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        out, scale = ctx.saved_tensors
        dims = [d for d in range(g.dim()) if d != 1]
        means = torch.cat([g.mean(dims), (g * out).mean(dims)])
        ctx.link.mean_(means)()
        first, second = (_by_channel(m, g) for m in means.chunk(2))
        return ((g - first - out * second) * _by_channel(scale, g)).to(ctx.dtype), None, None, None


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


@torch.no_grad()
def _follow_(layer: Any, mean: Tensor, var: Tensor) -> None:
    """Running statistics one batch further."""
    layer.num_batches_tracked.add_(1)
    share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
    layer.running_var.lerp_(var.to(layer.running_var.dtype), share)
