"""Shared by the compiled layer kernels: result type, number of threads, workspace memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGN = 64
# Multiplications that justify another thread.
_PER_THREAD = 1 << 19
_space = threading.local()


@dataclass(frozen=True)
class Sums:
    """Σ g and Σ g² over examples of the per-example gradients g of a weight and, if requested, of a bias.

    Of a bias there may be `bias_rows`, every example's gradient, instead of `bias_squares`.
    """

    total: Tensor
    squares: Tensor
    bias_total: Tensor | None = None
    bias_squares: Tensor | None = None
    bias_rows: Tensor | None = None


def threads_for(work: int) -> int:
    """Number of threads for `work` multiplications."""
    return max(1, min(torch.get_num_threads(), work // _PER_THREAD))


def workspace(room: int) -> int:
    """Address of a buffer of `room` bytes, reused by this thread: allocating anew costs more than the arithmetic."""
    space = getattr(_space, "tensor", None)
    if space is None or space.numel() < room + _ALIGN:
        _space.tensor = None  # release before allocating the larger one
        _space.tensor = space = torch.empty(room + _ALIGN, dtype=torch.uint8, device="cpu")
    address: int = space.data_ptr()
    return -(-address // _ALIGN) * _ALIGN


def address(tensor: Tensor | None) -> int | None:
    """Data pointer of a tensor for a compiled function."""
    return None if tensor is None else tensor.data_ptr()
