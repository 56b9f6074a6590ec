"""nn.RNN, nn.LSTM and nn.GRU, layer by layer: a single product over time gives gradients and their squares.

Run example by example they would cost twenty times as much, every example's weight gradient being a sum over time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from credo.core.kernels.conv_squares import shared_linear_sums
from credo.core.per_example.hook_plan import HookedLayer
from credo.core.per_example.hooks import PerExamplePass
from credo.core.per_example.layer_calls import LayerCall, plain_forward
from credo.core.per_example.layer_rules import check_first_order, full_precision, linear
from credo.core.per_example.sequences.rnn_cells import RecurrentCell, before, cell_of

_KINDS = ("ih", "hh")


def recurrent_forward(run: PerExamplePass, hooked: HookedLayer, own: dict[str, Any]) -> Callable[..., Any]:
    """The forward of a recurrent layer, for one pass.

    Args:
        run: The pass.
        hooked: The layer.
        own: Its parameters.
    """
    plain = plain_forward(hooked.layer, own)
    names = tuple(hooked.names.values())

    def forward(input: Any, hx: Any = None) -> Any:
        if not (run.active and torch.is_grad_enabled()):
            return plain(input, hx)
        if not isinstance(input, Tensor) or input.dim() != 3:
            run.too_narrow(names, f"belongs to {hooked.path}, which gets no plain batch of sequences")
            return plain(input, hx)
        if not run.count(hooked.path, input, 3, names):
            return plain(input, hx)
        if not input.shape[1]:
            return plain(input, hx)  # torch's own error
        with full_precision(input.device.type):
            return _unrolled(run, hooked, own, input, hx)

    return forward


def _unrolled(run: PerExamplePass, hooked: HookedLayer, own: dict[str, Any], x: Tensor, hx: Any) -> Any:
    layer: Any = hooked.layer
    like: Tensor = own["weight_hh_l0"]
    ways = 2 if layer.bidirectional else 1
    x, has_memory = x.to(like.dtype), layer.mode == "LSTM"
    zeros = like.new_zeros(layer.num_layers * ways, len(x), layer.hidden_size)
    hx = ((zeros, zeros) if has_memory else zeros) if hx is None else hx
    layer.check_forward_args(x, hx, None)
    firsts, memories = hx if has_memory else (hx, None)
    last_states, last_memories = [], []
    for level in range(layer.num_layers):
        outs = []
        for way in range(ways):
            index = level * ways + way
            calls, weights = _direction(run, hooked, own, f"l{level}" + "_reverse" * way)
            memory = None if memories is None else memories[index].to(like.dtype)
            given = x.flip(1) if way else x
            unroll: Any = _Unrolled.apply
            out, last = unroll(calls, cell_of(layer), given, firsts[index].to(like.dtype), memory, *weights)
            last_states.append(out[:, -1])
            last_memories.append(last)
            outs.append(out.flip(1) if way else out)
        x = torch.cat(outs, 2) if ways > 1 else outs[0]
        if layer.dropout and layer.training and level < layer.num_layers - 1:
            x = F.dropout(x, layer.dropout)
    states = torch.stack(last_states)
    return (x, (states, torch.stack(last_memories))) if has_memory else (x, states)


def _direction(
    run: PerExamplePass, hooked: HookedLayer, own: dict[str, Any], suffix: str
) -> tuple[list[LayerCall], list[Tensor | None]]:
    """The two linear maps of one layer and direction, by input and by state, and W_ih, W_hh, b_ih, b_hh."""
    calls = []
    keys = [(f"weight_{kind}_{suffix}", f"bias_{kind}_{suffix}") for kind in _KINDS]
    for weight, bias in keys:
        names = {key: hooked.names[full] for key, full in (("weight", weight), ("bias", bias)) if full in hooked.names}
        calls.append(LayerCall(run, names, linear(hooked.layer), {"weight": own[weight], "bias": own.get(bias)}))
    return calls, [*(own[weight] for weight, _ in keys), *(own.get(bias) for _, bias in keys)]


class _Unrolled(torch.autograd.Function):
    """One direction of one layer, [batch, time, features]; gives all states and the last memory."""

    @staticmethod
    def forward(
        ctx: Any,
        calls: list[LayerCall],
        cell: RecurrentCell,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """ctx, the two `calls`, the cell, input x, first state h0 and memory c0, and w_ih, w_hh, b_ih, b_hh."""
        states, memory, saved = cell.run(x.transpose(0, 1), h0, c0, (w_ih, w_hh, b_ih, b_hh))
        ctx.calls, ctx.cell, ctx.has_memory = calls, cell, c0 is not None
        ctx.save_for_backward(x, h0, c0, w_ih, w_hh, states, *saved)
        return states.transpose(0, 1), memory

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dc: Tensor | None) -> tuple[Tensor | None, ...]:
        """From gradients dh by all states and dc by the last memory; ctx is autograd's."""
        check_first_order()
        x, h0, c0, w_ih, w_hh, states, *saved = ctx.saved_tensors
        needs = ctx.needs_input_grad
        with full_precision(dh.device.type):
            dh = dh.transpose(0, 1)
            found = ctx.cell.back(tuple(saved), states, h0, c0, w_hh, dh, dc if ctx.has_memory else None)
            g_ih = found.inputs.transpose(0, 1).contiguous()
            is_one = found.states is found.inputs
            g_hh = g_ih if is_one else found.states.transpose(0, 1).contiguous()
            dx = torch.matmul(g_ih, w_ih) if needs[2] else None
            hidden = before(states, h0).transpose(0, 1).contiguous()
            by_ih = _take(ctx.calls[0], x, g_ih, weight=needs[5], bias=needs[7])
            by_hh = _take(ctx.calls[1], hidden, g_hh, weight=needs[6], bias=needs[8])
        memory = found.memory if needs[4] else None
        first = found.first if needs[3] else None
        return None, None, dx, first, memory, by_ih[0], by_hh[0], by_ih[1], by_hh[1]


def _take(call: LayerCall, x: Tensor, g: Tensor, *, weight: bool, bias: bool) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by weight and bias; the call takes their squares."""
    if not (weight or bias):
        return None, None
    sums = shared_linear_sums(x, g, bias=bias, scale=float(len(g)) ** 2)
    if call.names and call.expected():
        call.take(x, g, sums if call.run.weights is None else None)
    return sums.total if weight else None, sums.bias_total if bias else None
