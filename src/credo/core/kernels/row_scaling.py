"""Passes over activations: compiled dropout that regenerates its mask, and per-example feature scaling.

Compiled for plain float32 tensors on the CPU; check with `can_drop` and `can_scale`.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from credo.core.kernels.flat import INT64, PLAIN, address, kernels_for, loaded, threads_for, word


def can_drop(x: Tensor) -> bool:
    """Whether `dropped` supports this tensor: plain, float32, on the CPU, outside torch.func."""
    return _is_plain(x) and kernels_for(x.device, x.dtype) is not None


def dropped(x: Tensor, rate: float, key: int) -> Tensor:
    """Dropout of `x`: entries are zeroed with probability `rate`, the others divided by 1 − rate.

    The backward pass regenerates the mask from `key` instead of storing it.
    """
    channels_last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    order = torch.channels_last if channels_last else torch.contiguous_format
    result: Tensor = _Dropped.apply(x, rate, key, order)  # type: ignore[no-untyped-call]
    return result


class _Dropped(torch.autograd.Function):
    """Autograd function of `dropped`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, key: int, order: torch.memory_format) -> Tensor:
        """Apply dropout at `rate` to `x`; entry i in memory `order` has bit i of the mask of `key` (kept in `ctx`)."""
        ctx.numbers = rate, key, order
        x = x.contiguous(memory_format=order)
        out = torch.empty_like(x)
        size, scale = x.numel(), ctypes.c_float(1 / (1 - rate))
        least = ctypes.c_uint32(min(round(rate * 2**32), 2**32 - 1))
        loaded().credo_dropout(address(x), word(key), INT64(size), least, scale, address(out), threads_for(size))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        by_x: Tensor = _Dropped.apply(gradients[0], *ctx.numbers)  # type: ignore[no-untyped-call]
        return by_x, None, None, None


def scaled_rows(x: Tensor, scale: Tensor) -> Tensor:
    """x [rows, features, …] times scale [rows, features]: both gradients in one compiled pass, or one operator each.

    Requires `can_scale`.
    """
    result: Tensor = _ScaledRows.apply(x, scale)  # type: ignore[no-untyped-call]
    return result


def can_scale(x: Tensor, scale: Tensor) -> bool:
    """Whether `scaled_rows` supports these: plain and contiguous; compiled, with more than two dimensions."""
    plain = _is_plain(x) and _is_plain(scale) and x.dtype is scale.dtype and x.is_contiguous()
    return plain and (x.dim() > 2 or kernels_for(x.device, x.dtype) is None)


class _ScaledRows(torch.autograd.Function):
    """Autograd function of `scaled_rows`; double backward goes through torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        """x·scale; both are saved in `ctx`."""
        ctx.save_for_backward(x, scale)
        if kernels_for(x.device, x.dtype) is None:
            return x * _wide(scale, x)
        scale, out = scale.contiguous(), torch.empty_like(x)
        rows, threads = scale.numel(), threads_for(x.numel())
        loaded().credo_scale_rows(
            address(x), address(scale), INT64(rows), INT64(math.prod(x.shape[2:])), address(out), threads
        )
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor]:
        x, scale = ctx.saved_tensors
        (g,) = gradients
        if torch.is_grad_enabled() and (x.requires_grad or scale.requires_grad or g.requires_grad):
            return g * _wide(scale, x), (g * x).reshape(*scale.shape, math.prod(x.shape[2:])).sum(2)
        if kernels_for(x.device, x.dtype) is None:
            return _by_torch(x, scale, g, needs_input=ctx.needs_input_grad[0])
        g, scale = g.contiguous(), scale.contiguous()
        by_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        by_scale = torch.empty_like(scale)
        loaded().credo_scale_rows_back(
            address(x), address(scale), address(g), INT64(scale.numel()), INT64(math.prod(x.shape[2:])),
            None if by_x is None else address(by_x), address(by_scale), threads_for(x.numel()),
        )  # fmt: skip
        return by_x, by_scale


def _wide(scale: Tensor, like: Tensor) -> Tensor:
    return scale.reshape(*scale.shape, *[1] * (like.dim() - 2))


def _by_torch(x: Tensor, scale: Tensor, g: Tensor, *, needs_input: bool) -> tuple[Tensor | None, Tensor]:
    """The gradients by x and scale."""
    if x.dim() == 2 and needs_input:
        by_x, by_scale = torch._foreach_mul([g, g], [scale, x])
        return by_x, by_scale
    rows, positions = scale.numel(), math.prod(x.shape[2:])
    inner = (g.reshape(rows, 1, positions), x.view(rows, positions, 1))
    by_scale = g * x if x.dim() == 2 else torch.bmm(*inner).view(scale.shape)
    return g * _wide(scale, x) if needs_input else None, by_scale


def _is_plain(x: Tensor) -> bool:
    return type(x) in PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(x)
