"""What the compiled layer kernels share: their results, threads and memory to work in."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGN = 64
# Multiplications that a further thread must have to be worth waking.
_PER_THREAD = 1 << 19
_space = threading.local()


@dataclass(frozen=True)
class Sums:
    """Σ g and Σ g² over the examples, g being one example's gradient, by the weight and (if asked for) by the bias."""

    total: Tensor
    squares: Tensor
    bias_total: Tensor | None = None
    bias_squares: Tensor | None = None


def threads_for(work: int) -> int:
    """How many threads that many multiplications are worth."""
    return max(1, min(torch.get_num_threads(), work // _PER_THREAD))


def workspace(room: int) -> int:
    """Address of this thread's memory to work in, kept between calls: fresh memory costs more than the arithmetic."""
    space = getattr(_space, "tensor", None)
    if space is None or space.numel() < room + _ALIGN:
        _space.tensor = None  # released before the larger one is made
        _space.tensor = space = torch.empty(room + _ALIGN, dtype=torch.uint8, device="cpu")
    address: int = space.data_ptr()
    return -(-address // _ALIGN) * _ALIGN


def address(tensor: Tensor | None) -> int | None:
    """Where its entries are, for a compiled function."""
    return None if tensor is None else tensor.data_ptr()
