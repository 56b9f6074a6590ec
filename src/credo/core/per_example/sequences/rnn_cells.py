"""Recurrent cells over time, forwards and backwards: pure functions of what the layer's input contributes.

Tensors are [time, batch, features]. Gates come in torch's order; `inputs` is W_ih·x + b_ih at every time, and gradients
are those by that and by W_hh·h + b_hh, which differ where a gate lies between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Saved = tuple[Tensor, ...]


@dataclass(frozen=True)
class Gradients:
    """Gradients by W_ih·x + b_ih, by W_hh·h + b_hh, by the first state and (LSTM) by the first memory."""

    inputs: Tensor
    states: Tensor
    first: Tensor
    memory: Tensor | None = None


@dataclass(frozen=True)
class RecurrentCell:
    """A cell over all times.

    Attributes:
        run: `run(inputs, h0, c0, w_hh, b_hh)` gives all states, the last memory, and the tensors that `back` needs.
        back: `back(saved, states, h0, c0, w_hh, dh, dc)` gives gradients; `dh` are those by all states, `dc` that by
            the last memory.
    """

    run: Callable[..., tuple[Tensor, Tensor | None, Saved]]
    back: Callable[..., Gradients]


def is_recurrent(layer: nn.Module) -> bool:
    """Whether this is a recurrent layer that is unrolled here: batch first, no projection, parameters of its own."""
    if type(layer) not in (nn.RNN, nn.LSTM, nn.GRU):
        return False
    module: Any = layer
    plain = module._parameters.keys() == set(module._flat_weights_names) and "forward" not in module.__dict__
    return plain and module.batch_first and not module.proj_size


def cell_of(layer: nn.Module) -> RecurrentCell:
    """The cell of a recurrent layer."""
    return CELLS[layer.mode]  # type: ignore[index]


def before(states: Tensor, first: Tensor) -> Tensor:
    """The state at the beginning of each time."""
    return torch.cat([first.unsqueeze(0), states[:-1]])


# -- LSTM: c ← f·c + i·g, h ← o·tanh(c) ------------------------------------------------------------------------------


def _lstm(inputs: Tensor, h: Tensor, c: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None, Saved]:
    gates = inputs if b is None else inputs + b
    gates = gates.clone() if gates is inputs else gates
    times, size = len(inputs), h.shape[1]
    states, memories = h.new_empty(times, *h.shape), h.new_empty(times, *h.shape)
    back = w.t()
    for t in range(times):
        now = gates[t].addmm_(h, back)
        now[:, : 2 * size].sigmoid_()
        now[:, 2 * size : 3 * size].tanh_()
        now[:, 3 * size :].sigmoid_()
        i, f, g, o = now.split(size, 1)
        c = torch.mul(f, c, out=memories[t]).addcmul_(i, g)
        h = torch.tanh(c, out=states[t]).mul_(o)
    return states, memories[-1].clone(), (gates, memories)


def _lstm_back(
    saved: Saved, states: Tensor, h0: Tensor, c0: Tensor, w: Tensor, dh: Tensor, dc: Tensor | None
) -> Gradients:
    gates, memories = saved
    times, batch, size = states.shape
    i, f, g, o = gates.split(size, 2)
    tanh = memories.tanh()
    # Each gate's gradient is that by the memory (for o: by the state) times one of these.
    by_memory = torch.stack([g * i * (1 - i), before(memories, c0) * f * (1 - f), i * (1 - g * g)], 2)
    by_state, into = tanh * o * (1 - o), o * (1 - tanh * tanh)
    found = gates.new_empty(times, batch, 4, size)
    memory = torch.zeros_like(h0) if dc is None else dc.clone()
    state = torch.zeros_like(h0)
    for t in range(times - 1, -1, -1):
        state = state + dh[t]
        memory = memory.addcmul_(state, into[t])
        torch.mul(memory.unsqueeze(1), by_memory[t], out=found[t, :, :3])
        torch.mul(state, by_state[t], out=found[t, :, 3])
        state = found[t].flatten(1) @ w
        memory = memory * f[t]
    each = found.flatten(2)
    return Gradients(each, each, state, memory)


# -- GRU: n = tanh(input + r·(W·h + b)), h ← (1 − z)·n + z·h ---------------------------------------------------------


def _gru(inputs: Tensor, h: Tensor, c: None, w: Tensor, b: Tensor | None) -> tuple[Tensor, None, Saved]:
    times, size = len(inputs), h.shape[1]
    states, parts = h.new_empty(times, *h.shape), inputs.clone()
    inner, back = h.new_empty(times, *h.shape), w.t()
    for t in range(times):
        own = h @ back if b is None else torch.addmm(b, h, back)
        now = parts[t]
        r, z = now[:, : 2 * size].add_(own[:, : 2 * size]).sigmoid_().split(size, 1)
        q = inner[t].copy_(own[:, 2 * size :])
        n = now[:, 2 * size :].addcmul_(r, q).tanh_()
        h = torch.lerp(n, h, z, out=states[t])
    return states, None, (parts, inner)


def _gru_back(saved: Saved, states: Tensor, h0: Tensor, c0: None, w: Tensor, dh: Tensor, dc: None) -> Gradients:
    parts, inner = saved
    times, size = len(states), h0.shape[1]
    r, z, n = parts.split(size, 2)
    new = (1 - z) * (1 - n * n)
    reset, keep = new * inner * r * (1 - r), (before(states, h0) - n) * z * (1 - z)
    by_state = torch.cat([reset, keep, new * r], 2)
    arrived, found = torch.empty_like(states), torch.empty_like(parts)
    state = torch.zeros_like(h0)
    for t in range(times - 1, -1, -1):
        state = torch.add(state, dh[t], out=arrived[t])
        shape = (-1, 3, size)
        torch.mul(state.unsqueeze(1), by_state[t].view(shape), out=found[t].view(shape))
        state = torch.addmm(state * z[t], found[t], w)
    inputs = torch.cat([found[..., : 2 * size], arrived * new], 2)
    return Gradients(inputs, found, state)


# -- plain: h ← tanh or relu -----------------------------------------------------------------------------------------


def _plain(activation: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, None, Saved]]:
    def run(inputs: Tensor, h: Tensor, c: None, w: Tensor, b: Tensor | None) -> tuple[Tensor, None, Saved]:
        """As `RecurrentCell.run`: inputs, first state h, no memory c, weight w and bias b."""
        states = inputs.clone() if b is None else inputs + b
        back = w.t()
        for t in range(len(inputs)):
            h = activation(states[t].addmm_(h, back))
        return states, None, ()

    return run


def _plain_back(derivative: Callable[[Tensor], Tensor]) -> Callable[..., Gradients]:
    def back(saved: Saved, states: Tensor, h0: Tensor, c0: None, w: Tensor, dh: Tensor, dc: None) -> Gradients:
        """As `RecurrentCell.back`: saved (nothing), states, h0, c0, w, dh, dc."""
        factors, found = derivative(states), torch.empty_like(states)
        state = torch.zeros_like(h0)
        for t in range(len(states) - 1, -1, -1):
            torch.mul(state.add_(dh[t]), factors[t], out=found[t])
            state = found[t] @ w
        return Gradients(found, found, state)

    return back


CELLS = {
    "LSTM": RecurrentCell(_lstm, _lstm_back),
    "GRU": RecurrentCell(_gru, _gru_back),
    "RNN_TANH": RecurrentCell(_plain(torch.tanh_), _plain_back(lambda h: 1 - h * h)),
    "RNN_RELU": RecurrentCell(_plain(F.relu_), _plain_back(lambda h: (h > 0).to(h.dtype))),
}
