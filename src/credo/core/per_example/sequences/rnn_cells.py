"""Recurrent cells over time: torch's own pass forwards, its gates found again at all times at once, and gradients.

Tensors are [time, batch, features]. Gates come in torch's order; `inputs` is W_ih·x + b_ih at every time, `inner` is
W_hh·h + b_hh, and gradients are those by both, which differ where a gate lies between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.kernels import lstm

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
        forward: Torch's function, of one layer and direction here.
        replay: `replay(inputs, inner, c0)` gives the tensors that `back` needs, and may change `inputs`; None: none.
        back: `back(saved, states, h0, c0, w_hh, dh, dc)` gives gradients; `dh` are those by all states, `dc` that by
            the last memory.
    """

    forward: Callable[..., tuple[Tensor, ...]]
    replay: Callable[..., Saved] | None
    back: Callable[..., Gradients]

    def run(
        self, x: Tensor, h0: Tensor, c0: Tensor | None, weights: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """All states, the last memory, and the tensors that `back` needs.

        Args:
            x: What goes in.
            h0: The first state.
            c0: The first memory; None: the cell has none.
            weights: W_ih, W_hh, b_ih, b_hh.
        """
        w_ih, w_hh, b_ih, b_hh = weights
        assert w_ih is not None
        assert w_hh is not None
        if c0 is not None and lstm.usable(x, h0, c0, *weights):
            bias = None if b_ih is None or b_hh is None else b_ih + b_hh
            gates = F.linear(x.transpose(0, 1), w_ih, bias).contiguous()
            states, memories = lstm.forward(gates, h0, c0, w_hh)
            return states.transpose(0, 1), memories[:, -1], (gates.transpose(0, 1), memories.transpose(0, 1))
        given = [weight for weight in weights if weight is not None]
        first = h0.unsqueeze(0) if c0 is None else (h0.unsqueeze(0), c0.unsqueeze(0))
        states, *last = self.forward(x, first, given, len(given) > 2, 1, 0.0, False, False, False)
        memory = None if c0 is None else last[1].squeeze(0)
        if self.replay is None:
            return states, memory, ()
        inputs, inner = F.linear(x, w_ih, b_ih), F.linear(before(states, h0), w_hh, b_hh)
        return states, memory, self.replay(inputs, inner, c0)


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


def _lstm(inputs: Tensor, inner: Tensor, c: Tensor) -> Saved:
    gates, size = inputs.add_(inner), c.shape[1]
    gates[..., : 2 * size].sigmoid_()
    gates[..., 2 * size : 3 * size].tanh_()
    gates[..., 3 * size :].sigmoid_()
    i, f, g, _ = gates.split(size, 2)
    memories = i * g
    for memory, keep in zip(memories.unbind(), f.unbind(), strict=True):
        c = memory.addcmul_(keep, c)
    return gates, memories


def _lstm_back(
    saved: Saved, states: Tensor, h0: Tensor, c0: Tensor, w: Tensor, dh: Tensor, dc: Tensor | None
) -> Gradients:
    gates, memories = saved
    if lstm.usable(gates, dh):
        gates, memories, dh = (part.transpose(0, 1) for part in (gates, memories, dh))
        compiled, state, memory = lstm.back(gates, memories, c0, w, dh, dc)
        gradients = compiled.transpose(0, 1)
        return Gradients(gradients, gradients, state, memory)
    times, batch, size = states.shape
    i, f, g, o = gates.split(size, 2)
    tanh = memories.tanh()
    # Each gate's gradient is that by the memory (for o: by the state) times one of these.
    by_memory = torch.stack([g * i * (1 - i), before(memories, c0) * f * (1 - f), i * (1 - g * g)], 2)
    by_state, into = tanh * o * (1 - o), o * (1 - tanh * tanh)
    found = gates.new_empty(times, batch, 4, size)
    memory = torch.zeros_like(h0) if dc is None else dc.clone()
    state, none = dh[-1], torch.zeros_like(h0)
    each = (before(dh, none), into, by_memory, by_state, f, found[:, :, :3], found[:, :, 3], found.flatten(2))
    for earlier, inward, of_memory, of_state, keep, first, last, whole in zip(
        *(reversed(part.unbind()) for part in each), strict=True
    ):
        memory.addcmul_(state, inward)
        torch.mul(memory.unsqueeze(1), of_memory, out=first)
        torch.mul(state, of_state, out=last)
        state = torch.addmm(earlier, whole, w)
        memory.mul_(keep)
    gradients = found.flatten(2)
    return Gradients(gradients, gradients, state, memory)


# -- GRU: n = tanh(input + r·(W·h + b)), h ← (1 − z)·n + z·h ---------------------------------------------------------


def _gru(inputs: Tensor, inner: Tensor, c: None) -> Saved:
    size = inputs.shape[2] // 3
    r, _ = inputs[..., : 2 * size].add_(inner[..., : 2 * size]).sigmoid_().split(size, 2)
    inputs[..., 2 * size :].addcmul_(r, inner[..., 2 * size :]).tanh_()
    return inputs, inner[..., 2 * size :]


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
    "LSTM": RecurrentCell(torch.lstm, _lstm, _lstm_back),
    "GRU": RecurrentCell(torch.gru, _gru, _gru_back),
    "RNN_TANH": RecurrentCell(torch.rnn_tanh, None, _plain_back(lambda h: 1 - h * h)),
    "RNN_RELU": RecurrentCell(torch.rnn_relu, None, _plain_back(lambda h: (h > 0).to(h.dtype))),
}
