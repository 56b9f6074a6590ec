"""nn.MultiheadAttention for one call: its projections are linear maps, which make gradients and squares together.

The module applies its projections as functions, so that no layer of the table ever runs. Run example by example it
would need a second pass, which also could not have dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.kernels.common import Sums
from credo.core.per_example.hook_plan import HookedLayer
from credo.core.per_example.hooks import PerExamplePass
from credo.core.per_example.layer_calls import plain_forward
from credo.core.per_example.layer_rules import computes_gradient_of, fused_forward, linear, widened

# Names of the packed projection's parameters, of those of queries, keys and values apart, and of the output's.
_PACKED, _BIAS = "in_proj_weight", "in_proj_bias"
_APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_OUT = ("out_proj.weight", "out_proj.bias")


def is_attention(layer: nn.Module) -> bool:
    """Whether this is an attention layer that is run here: batch first, its own parameters, nothing appended."""
    if type(layer) is not nn.MultiheadAttention or "forward" in layer.__dict__:
        return False
    known = {_PACKED, _BIAS, *_APART}
    plain = layer._parameters.keys() == known and layer.out_proj._parameters.keys() == {"weight", "bias"}
    untouched = type(layer.out_proj).__name__ == "NonDynamicallyQuantizableLinear" and not layer.add_zero_attn
    return plain and untouched and layer.batch_first


def attention_forward(run: PerExamplePass, hooked: HookedLayer, own: dict[str, Any]) -> Callable[..., Any]:
    """The forward of an attention layer, for one pass.

    Args:
        run: The pass.
        hooked: The layer.
        own: Its parameters.
    """
    layer: Any = hooked.layer
    inner: dict[str, Any] = layer.out_proj._parameters
    plain = _with_inner(layer.out_proj, inner, plain_forward(layer, own))
    names = tuple(hooked.names.values())

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        masks = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        if not (run.active and torch.is_grad_enabled()) or (is_causal and attn_mask is None):
            return plain(query, key, value, *masks)
        if not run.count(hooked.path, query, 3, names) or not len(query) == len(key) == len(value):
            run.too_narrow(names, f"belongs to {hooked.path}, which gets no plain batch of sequences")
            return plain(query, key, value, *masks)
        call = AttentionCall(
            run, hooked.names, {**own, **dict(zip(_OUT, (inner["weight"], inner["bias"]), strict=True))}
        )
        q, k, v = (_heads(t, layer.num_heads) for t in call.projected(query, key, value))
        mask = _merged(attn_mask, key_padding_mask, q)
        rate = layer.dropout if layer.training else 0.0
        if not need_weights:
            mixed, shown = F.scaled_dot_product_attention(q, k, v, mask, rate), None
        else:
            scores = (q / math.sqrt(q.shape[-1])) @ k.mT
            each = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), rate)
            mixed, shown = each @ v, each.mean(1) if average_attn_weights else each
        return call.through(mixed.transpose(1, 2).flatten(2), *_OUT), shown

    return forward


def _with_inner(projection: nn.Module, inner: dict[str, Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """The layer's own forward, which also reads the parameters of its output's projection as they are."""
    attributes = projection.__dict__

    def forward(*args: Any) -> Any:
        guarded, attributes["_parameters"] = attributes["_parameters"], inner
        try:
            return plain(*args)
        finally:
            attributes["_parameters"] = guarded

    return forward


def _heads(x: Tensor, heads: int) -> Tensor:
    found: Tensor = x.unflatten(-1, (heads, -1))
    return found.transpose(1, 2)


def _merged(mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """Both masks as what is added to scores [batch, heads, queries, keys]; True forbids a key."""
    batch, heads = q.shape[:2]
    if mask is not None:
        mask = _added(mask.unflatten(0, (batch, heads)) if mask.dim() == 3 else mask, q)
    if padding is None:
        return mask
    padding = _added(padding.view(batch, 1, 1, -1), q)
    return padding if mask is None else mask + padding


def _added(mask: Tensor, q: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -math.inf)


class AttentionCall:
    """One call of an attention layer: the linear maps in it, and what has arrived of its squares.

    Args:
        run: The pass.
        names: Names in the network of the wanted parameters, by their names in the layer.
        own: The layer's parameters.
    """

    def __init__(self, run: PerExamplePass, names: Mapping[str, str], own: Mapping[str, Any]) -> None:
        self.run, self.names, self.own = run, names, own
        self._is_skipped = False
        self._arrived: set[tuple[str, int]] = set()

    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values, those of one input by one product."""
        size = query.shape[-1]
        if self.own[_PACKED] is None:
            inputs = zip(_APART, (query, key, value), range(3), strict=True)
            return [self.through(x, name, _BIAS, size, slice(i * size, (i + 1) * size)) for name, x, i in inputs]
        if query is key is value:
            return list(self.through(query, _PACKED, _BIAS).split(size, -1))
        parts = [(query, 1), (key, 2)] if key is value else [(query, 1), (key, 1), (value, 1)]
        found, start = [], 0
        for x, count in parts:
            rows = slice(start, start := start + count * size)
            found += self.through(x, _PACKED, _BIAS, size, rows).split(size, -1)
        return found

    def through(self, x: Tensor, weight: str, bias: str, size: int = 0, rows: slice | None = None) -> Tensor:
        """A linear map of the layer.

        Args:
            x: The input.
            weight: Name of the weight in the layer.
            bias: Name of the bias.
            size: Rows of the weight of one projection.
            rows: Those of the bias, and of a packed weight, that are used; None: all.
        """
        own = {"weight": self.own[weight], "bias": self.own[bias]}
        cut = {key: rows if rows is not None and tensor is not None and len(tensor) > size else None
               for key, tensor in own.items()}  # fmt: skip
        used = {k: t if cut[k] is None or t is None else t[cut[k]] for k, t in own.items()}
        names = {k: self.names[name] for k, name in (("weight", weight), ("bias", bias)) if name in self.names}
        rule = linear(nn.Identity())
        assert rule.fused is not None
        return fused_forward(Projection(self, names, own, cut), rule.fused, x, used, nn.Identity())

    def skip(self) -> None:
        """The call was differentiated by its inputs only: once for all of its maps."""
        if not self._is_skipped:
            self._is_skipped = True
            self.run.skip(self.names.values())

    def put(self, name: str, squares: Tensor, whole: Tensor, rows: slice | None) -> None:
        """Take the squares of some rows of a parameter.

        Args:
            name: The parameter.
            squares: Its squares.
            whole: A tensor like all of it.
            rows: The rows; None: all.
        """
        if rows is None:
            self.run.put(name, squares)
            return
        if (name, rows.start) in self._arrived:
            raise self.run.came_twice(name)
        if not any(name == known for known, _ in self._arrived):
            self.run.put(name, squares.new_zeros(whole.shape))
        self._arrived.add((name, rows.start))
        self.run.squares[name][rows] = squares


class Projection:
    """One linear map of an attention layer, which takes its sums when the gradient arrives.

    Args:
        call: The call of the layer.
        names: Names in the network of the wanted parameters, by `"weight"` and `"bias"`.
        own: The parameters.
        rows: The rows of each that are used; None: all.
    """

    def __init__(
        self, call: AttentionCall, names: Mapping[str, str], own: Mapping[str, Any], rows: Mapping[str, slice | None]
    ) -> None:
        self.call, self.names, self.own, self.rows = call, names, own, rows

    def expected(self) -> bool:
        """Whether the backward pass that is running computes gradients by the weights, not only by inputs."""
        expected = computes_gradient_of(self.own[next(iter(self.names), "weight")])
        if not expected:
            self.call.skip()
        return expected

    def take(self, x: Tensor, g: Tensor, sums: Sums) -> None:
        """Give the pass the squares of parameters that only this call uses, and else each example's gradients."""
        run, rule = self.call.run, linear(nn.Identity())
        x, g = widened(x.detach()), widened(g)
        found: Mapping[str, Tensor | None] = {"weight": sums.squares, "bias": sums.bias_squares}
        if run.weights is not None:
            found = rule.squares([*self.names], x, run.weights(g), float(len(g)) ** 2)
        for key, name in self.names.items():
            squares = found[key]
            if run.uses[name] == 1 and squares is not None:
                self.call.put(name, squares, self.own[key], self.rows[key])
            else:
                each = rule.examples(key, x, g)
                run.several[name].append(partial(_in_rows, each, self.own[key].shape, self.rows[key]))


def _in_rows(each: Callable[[slice], Tensor], shape: torch.Size, rows: slice | None, part: slice) -> Tensor:
    """Gradients of some examples by some rows, as gradients by all."""
    found = each(part)
    if rows is None:
        return found
    whole = found.new_zeros(len(found), *shape)
    whole[:, rows] = found
    return whole
