"""Backward pass of batch normalisation with per-example squared gradients; compiled only."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from credo.core.kernels.build import library
from credo.core.kernels.common import Sums, address, threads_for, workspace

_SUFFIX = {torch.float32: "float", torch.float64: "double"}
# With fewer positions, the compiled loops do not pay off.
_FEW = 8


def usable(x: Tensor, weight: Tensor) -> bool:
    """Whether `norm_back` supports these: contiguous [batch, channels, …] on the CPU, with a compiler."""
    return (
        x.device.type == "cpu"
        and x.dtype in _SUFFIX
        and x.dtype is weight.dtype
        and x.dim() > 2
        and x.is_contiguous()
        and x.numel() >= _FEW * x.shape[0] * x.shape[1] > 0
        and library("norm_squares") is not None
    )


def norm_back(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    statistics: tuple[Tensor, Tensor] | None,
    eps: float,
    *,
    needs_input: bool,
    scale: float,
) -> tuple[Tensor | None, Sums]:
    """(gradient with respect to the input, sums over examples for the affine parameters).

    Args:
        x: Input, [batch, channels, …].
        g: Gradient at the output, of the same shape.
        weight: The layer's scale, [channels].
        statistics: Running mean and variance; None for those of the batch.
        eps: Added to the variance.
        needs_input: Whether to compute the gradient with respect to the input.
        scale: Factor on the sums of squares.
    """
    g = g.contiguous()
    batch, channels = x.shape[:2]
    positions = x.numel() // (batch * channels)
    dx = torch.empty_like(x) if needs_input else None
    sums = Sums(*(x.new_empty(channels) for _ in range(4)))
    mean, var = (None, None) if statistics is None else (s.to(x.dtype).contiguous() for s in statistics)
    _function(x.dtype)(
        batch, channels, positions, x.data_ptr(), g.data_ptr(), weight.contiguous().data_ptr(), address(mean),
        address(var), eps, scale, address(dx), address(sums.total), address(sums.squares), address(sums.bias_total),
        address(sums.bias_squares), workspace(8 * (5 * batch * channels + 4 * channels)), threads_for(4 * x.numel()),
    )  # fmt: skip
    return dx, sums


@lru_cache(maxsize=2)
def _function(dtype: torch.dtype) -> Any:
    kernels = library("norm_squares")
    assert kernels is not None  # checked by `usable`
    function = getattr(kernels, f"credo_norm_squares_{_SUFFIX[dtype]}")
    function.restype = None
    pointers, numbers = [ctypes.c_void_p], [ctypes.c_int64]
    function.argtypes = [*numbers * 3, *pointers * 5, *[ctypes.c_double] * 2, *pointers * 6, ctypes.c_int]
    return function
