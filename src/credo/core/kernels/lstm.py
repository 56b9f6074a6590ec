"""A layer of LSTM cells over all times, with what its backward pass needs, and that backward pass; compiled only."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from credo.core.kernels.build import library
from credo.core.kernels.common import address, threads_for


def usable(*tensors: Tensor | None) -> bool:
    """Whether these are supported: single precision on the CPU, with a compiler."""
    given = [tensor for tensor in tensors if tensor is not None]
    plain = all(tensor.device.type == "cpu" and tensor.dtype is torch.float32 for tensor in given)
    return plain and all(tensor.numel() for tensor in given) and library("lstm") is not None


def forward(gates: Tensor, h0: Tensor, c0: Tensor, w_hh: Tensor) -> tuple[Tensor, Tensor]:
    """(all states, all memories); the input is replaced by the gates.

    Args:
        gates: W_ih x and both biases, [batch, time, 4 · size], contiguous.
        h0: First state, [batch, size].
        c0: First memory.
        w_hh: The weight by the state.
    """
    sizes = *gates.shape[:2], w_hh.shape[1]
    states, memories = gates.new_empty(sizes), gates.new_empty(sizes)
    given = [tensor.contiguous() for tensor in (w_hh, h0, c0)]
    _call("credo_lstm", sizes, *given, gates, memories, states)
    return states, memories


def back(
    gates: Tensor, memories: Tensor, c0: Tensor, w_hh: Tensor, dh: Tensor, dc: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by what goes into the gates, by the first state and by the first memory.

    Args:
        gates: The gates, [batch, time, 4 · size].
        memories: All memories.
        c0: First memory.
        w_hh: The weight by the state.
        dh: Gradients by all states.
        dc: Gradient by the last memory; None: zero.
    """
    found, state = torch.empty_like(gates), torch.zeros_like(c0, memory_format=torch.contiguous_format)
    memory = state.clone() if dc is None else dc.clone(memory_format=torch.contiguous_format)
    given = [tensor.contiguous() for tensor in (w_hh, c0, gates, memories, dh)]
    _call("credo_lstm_back", memories.shape, *given, found, state, memory)
    return found, state, memory


def _call(name: str, sizes: tuple[int, ...], *tensors: Tensor) -> None:
    batch, times, size = sizes
    # Else the compiled code would read and write outside of them.
    assert all(t.device.type == "cpu" and t.dtype is torch.float32 and t.is_contiguous() for t in tensors)
    _function(name)(batch, times, size, *map(address, tensors), threads_for(4 * batch * times * size * size))


@lru_cache(maxsize=2)
def _function(name: str) -> Any:
    function = getattr(library("lstm"), name)
    function.restype = None
    pointers = 6 if name == "credo_lstm" else 8
    function.argtypes = [*[ctypes.c_int64] * 3, *[ctypes.c_void_p] * pointers, ctypes.c_int]
    return function
