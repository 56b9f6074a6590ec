"""Σ g and Σ g² over examples, g being one example's weight gradient of a convolution or a shared linear layer.

Per example, g = Σ over positions of (output gradient) × (input patch). Compiled if possible, else in torch over small
chunks of examples; g is never stored for the whole batch.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from credo.core.kernels import conv_by_torch
from credo.core.kernels.build import library
from credo.core.kernels.common import Sums, threads_for, workspace
from credo.core.kernels.conv_by_torch import ConvShape

_SUFFIX = {torch.float32: "float", torch.float64: "double"}


def conv_sums(x: Tensor, g: Tensor, shape: ConvShape, *, bias: bool = False, scale: float = 1.0) -> Sums:
    """Sums over examples of a convolution's per-example gradients and their squares.

    Args:
        x: Input, [batch, channels, …].
        g: Gradient at the output, [batch, outputs, …].
        shape: Kernel, stride, padding, dilation and groups.
        bias: Whether to compute the sums of the bias as well.
        scale: Factor on the sums of squares.
    """
    if prod(g.shape[2:]) > 1 and _compiled_for(x, g):
        return _conv(x, g, shape, bias, scale)
    total, squares = conv_by_torch.sums(x, g, shape)
    if not bias:
        return Sums(total, squares.mul_(scale))
    each = g.sum(tuple(range(2, g.dim())))
    return Sums(total, squares.mul_(scale), each.sum(0), bias_rows=each)


def shared_linear_sums(x: Tensor, g: Tensor, *, bias: bool = False, scale: float = 1.0) -> Sums:
    """Like `conv_sums` for a linear layer shared by all positions.

    Args:
        x: Input, [batch, positions, in].
        g: Gradient at the output, [batch, positions, out].
        bias: Whether to compute the sums of the bias as well.
        scale: Factor on the sums of squares.
    """
    if _compiled_for(x, g):
        # A convolution of width 1 whose channels are the features.
        sums = _conv(x.transpose(1, 2), g.transpose(1, 2), ConvShape((1,), (1,), (0,), (1,), 1), bias, scale)
        return Sums(sums.total[:, :, 0], sums.squares[:, :, 0], sums.bias_total, sums.bias_squares)
    total = torch.mm(g.flatten(0, 1).t(), x.flatten(0, 1))
    squares = conv_by_torch.linear_squares(x, g).mul_(scale)
    if not bias:
        return Sums(total, squares)
    each = g.sum(1)
    return Sums(total, squares, each.sum(0), each.square().sum(0).mul_(scale))


# -- compiled kernel --------------------------------------------------------------------------------------------------


def _compiled_for(x: Tensor, g: Tensor) -> bool:
    if x.device.type != "cpu" or x.dtype not in _SUFFIX or x.dtype is not g.dtype or g.numel() == 0:
        return False
    # Offsets within one example are 32-bit numbers.
    return library("conv_squares") is not None and max(x.numel(), g.numel()) // x.shape[0] < 1 << 28


@lru_cache(maxsize=2)
def _function(dtype: torch.dtype) -> Any:
    kernels = library("conv_squares")
    assert kernels is not None  # checked by `_compiled_for`
    function = getattr(kernels, f"credo_conv_squares_{_SUFFIX[dtype]}")
    function.restype = ctypes.c_int64
    function.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_double, ctypes.c_int64, ctypes.c_void_p]
    return function


def _conv(x: Tensor, g: Tensor, shape: ConvShape, bias: bool, scale: float) -> Sums:
    sizes = (list(part) for part in (shape.kernel, shape.stride, shape.padding, shape.dilation))
    total, squares, *shifts = torch.ops.credo.conv_squares(x, g, *sizes, shape.groups, bias, scale)
    return Sums(total, squares, *(shifts if bias else (None, None)))


def _compiled(
    x: Tensor,
    g: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    bias: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ g and Σ g² of the weight, then of the bias (empty if not `bias`)."""
    x, g = _flat(x), _flat(g)
    shape = ConvShape(tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), groups)
    total, squares, *shifts = _outputs(x, g, kernel, groups, bias)
    threads = threads_for(total.numel() * (g.numel() // g.shape[1]))
    geometry, room = _geometry(x.dtype, shape, x.shape, g.shape, x.stride(), g.stride(), threads)
    pointers = [part.data_ptr() if bias else None for part in shifts]
    _function(x.dtype)(
        geometry, x.data_ptr(), g.data_ptr(), total.data_ptr(), squares.data_ptr(), *pointers, scale, threads,
        workspace(room),
    )  # fmt: skip
    return total, squares, shifts[0], shifts[1]


def _traced(
    x: Tensor,
    g: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    bias: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(x, g, kernel, groups, bias)


# A torch operator, so that profilers name it, and tracing (compile, export) sees one call with known shapes instead of
# memory addresses.
_OPERATORS = torch.library.Library("credo", "FRAGMENT")
_OPERATORS.define(
    "conv_squares(Tensor x, Tensor g, int[] kernel, int[] stride, int[] padding, int[] dilation, int groups, "
    "bool bias, float scale) -> (Tensor, Tensor, Tensor, Tensor)"
)
_OPERATORS.impl("conv_squares", _compiled, "CPU")
_OPERATORS.impl("conv_squares", _traced, "Meta")


def _outputs(x: Tensor, g: Tensor, kernel: list[int], groups: int, bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight = (g.shape[1], x.shape[1] // groups, *kernel)
    shifts = g.shape[1] if bias else 0
    return g.new_empty(weight), g.new_empty(weight), g.new_empty(shifts), g.new_empty(shifts)


def _flat(tensor: Tensor) -> Tensor:
    """The tensor with flattenable positions, contiguous along positions or channels."""
    sizes, strides = tensor.shape[2:], tensor.stride()[2:]
    nested = all(strides[d] == strides[d + 1] * sizes[d + 1] for d in range(len(sizes) - 1))
    return tensor if nested and 1 in (tensor.stride(1), strides[-1]) else tensor.contiguous()


@lru_cache(maxsize=512)
def _geometry(
    dtype: torch.dtype,
    shape: ConvShape,
    x: tuple[int, ...],
    g: tuple[int, ...],
    x_strides: tuple[int, ...],
    g_strides: tuple[int, ...],
    threads: int,
) -> tuple[Any, int]:
    """The geometry struct of the compiled kernel, and its workspace size in bytes."""

    def three(values: tuple[int, ...], missing: int) -> tuple[int, ...]:
        return (missing,) * (3 - len(values)) + tuple(values)

    numbers = (
        x[0], shape.groups, x[1] // shape.groups, g[1] // shape.groups,
        *three(x[2:], 1), *three(g[2:], 1), *three(shape.kernel, 1), *three(shape.stride, 1),
        *three(shape.padding, 0), *three(shape.dilation, 1),
        x_strides[0], x_strides[1], x_strides[-1], g_strides[0], g_strides[1], g_strides[-1],
    )  # fmt: skip
    packed = (ctypes.c_int64 * len(numbers))(*numbers)
    return packed, _function(dtype)(packed, *[None] * 6, 1.0, threads, None)
