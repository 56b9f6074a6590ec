"""Forwards that covered layers run for one call: the same output, and squares when the gradient comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from credo.core.kernels.common import Sums
from credo.core.network.layer_table import EXAMPLE_GRADIENTS
from credo.core.per_example.autograd_state import computes_gradient_of
from credo.core.per_example.layer_rules import ExampleGradients, Fused, full_precision, widened
from credo.core.per_example.plan import LayerTap

if TYPE_CHECKING:
    from credo.core.per_example.accumulate import SquareSums


def tapped_forward(sums: SquareSums, tap: LayerTap, own: dict[str, Any]) -> Callable[..., Tensor]:
    """The layer's forward with an eye on what goes in and what comes back; `own` are its parameters."""
    layer: Any = tap.layer
    plain: Callable[..., Tensor] = plain_forward(layer, own)
    names = tuple(tap.names.values())
    has_weight = "weight" in tap.names

    def forward(*args: Any, **options: Any) -> Tensor:
        if not (sums.active and torch.is_grad_enabled()):
            return plain(*args, **options)
        x: Tensor = args[0] if args else next(iter(options.values()))
        rule = tap.rule or EXAMPLE_GRADIENTS[type(layer)](layer)
        if not sums.count(tap.path, x, rule.dims, names):
            return plain(*args, **options)
        use = Use(sums, tap, rule, own)
        # One pass for gradient and squares is impossible where rows have weights, which only the squares know of.
        if has_weight and rule.fused is not None and sums.balance.roots is None and rule.fused.suits(x, own["weight"]):
            return _fused_forward(use, rule.fused, x, own, plain)
        out = plain(*args, **options)
        if out.requires_grad:
            use.x = x if has_weight else None
            use.wait_at(out)
        return out

    return forward


def plain_forward(layer: nn.Module, own: dict[str, Any]) -> Callable[..., Any]:
    """The layer's forward with its parameters as they are, which nobody watches."""
    original: Any = type(layer).forward
    attributes = layer.__dict__

    def plain(*args: Any, **options: Any) -> Any:
        watched = attributes["_parameters"]
        attributes["_parameters"] = own
        try:
            return original(layer, *args, **options)
        finally:
            attributes["_parameters"] = watched

    return plain


class Use:
    """One run of a covered layer, waiting for its output's gradient."""

    __slots__ = ("own", "place", "rule", "shape", "sums", "tap", "x")

    def __init__(self, sums: SquareSums, tap: LayerTap, rule: ExampleGradients, own: dict[str, Any]) -> None:
        self.sums, self.tap, self.rule, self.own = sums, tap, rule, own
        self.x: Tensor | None = None

    def expected(self) -> bool:
        """Whether the backward pass that is running computes gradients by the weights, not only by inputs."""
        expected = computes_gradient_of(self.own[next(iter(self.tap.names))])
        if not expected:
            self.sums.skipped(self.tap.names.values())
        return expected

    def wait_at(self, out: Tensor) -> None:
        """Wait for the gradient by the layer's output, as it is now: an activation may change it in place."""
        # Changed in place, a view gets another node in the graph, and only what it is a view of keeps its own.
        made = out._base if out._is_view() and out._base is not None else out
        node = made.grad_fn
        assert node is not None
        self.place, self.shape = made.output_nr, out.shape
        node.register_prehook(self._arrived)

    def _arrived(self, gradients: tuple[Tensor | None, ...]) -> None:
        g = gradients[self.place]
        if g is not None and self.expected():
            x, self.x = self.x, None
            with full_precision(g.device.type):
                self.take(x, g.detach().reshape(self.shape))

    def take(self, x: Tensor | None, g: Tensor, sums: Sums | None = None) -> None:
        """Squares where this is the only use, else what later makes each example's gradients."""
        uses, names = self.sums.uses, self.tap.names
        if x is None and "weight" in names:
            raise self.sums.came_twice(names["weight"])
        g, scale = widened(g), float(g.shape[0] ** 2)
        once = self.sums.balance(g)  # several uses are added before they are squared, and balanced then
        if sums is not None:
            known = {"weight": sums.squares, "bias": sums.bias_squares}
        elif x is not None and self.rule.both is not None and uses[names["weight"]] == 1:
            known = dict(zip(("weight", "bias"), self.rule.both(widened(x.detach()), once, scale), strict=True))
        else:
            known = {}
        for key, name in names.items():
            squares = known.get(key)
            if squares is not None and uses[name] == 1:
                self.sums.put(name, squares)
                continue
            own = once if uses[name] == 1 else g
            if key == "bias":
                self._take(name, self.rule.bias(own), scale)
            else:
                assert x is not None
                self._take_weight(name, self.rule.features(widened(x.detach())), own, scale)

    def _take(self, name: str, each: Tensor, scale: float) -> None:
        if self.sums.uses[name] == 1:
            self.sums.put(name, each.square().sum(0).mul_(scale))
        else:
            self.sums.records[name].append(each.__getitem__)

    def _take_weight(self, name: str, a: Tensor, g: Tensor, scale: float) -> None:
        if self.sums.uses[name] == 1:
            self.sums.put(name, self.rule.weight_squares(a, g).mul_(scale))
        else:
            self.sums.records[name].append(partial(_part, self.rule.weight, a, g))


def _part(weight: Callable[[Tensor, Tensor], Tensor], a: Tensor, g: Tensor, part: slice) -> Tensor:
    return weight(a[part], g[part])


def watched(own: dict[str, Any], seen: Callable[[str, Tensor], Tensor], names: Mapping[str, str]) -> dict[str, Any]:
    """A layer's parameters as everybody but the layer itself gets them: those in `names` as `seen(name, tensor)`."""
    return _Watched(own, seen, names)


class _Watched(dict[str, Any]):
    def __init__(self, own: dict[str, Any], seen: Callable[[str, Tensor], Tensor], names: Mapping[str, str]) -> None:
        super().__init__(own)
        self._own, self._seen, self._names = own, seen, names

    def __getitem__(self, key: str) -> Any:
        tensor = super().__getitem__(key)
        return self._seen(self._names[key], tensor) if key in self._names and tensor is not None else tensor

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._own[key] = value

    def get(self, key: str, default: Any = None) -> Any:
        return dict(self.items()).get(key, default)

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        return [self[key] for key in self]


# -- gradient and squares in one go ----------------------------------------------------------------------------------


def _fused_forward(use: Use, fused: Fused, x: Tensor, own: dict[str, Any], plain: Callable[..., Tensor]) -> Tensor:
    if fused.before is not None:
        x = fused.before(x)
    kind = x.device.type
    lowered = fused.forward is not None and torch.is_autocast_enabled(kind) and x.dtype is not torch.float64
    if lowered:
        x = x.to(torch.get_autocast_dtype(kind))
    with full_precision(kind) if lowered else nullcontext():
        run: Any = _FusedLayer.apply
        out: Tensor = run(use, fused, plain, lowered, x, own["weight"], own.get("bias"))
    return out


class _FusedLayer(torch.autograd.Function):
    """A layer whose backward makes Σ g and Σ g² of its weight together, instead of the library's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        use: Use,
        fused: Fused,
        plain: Callable[..., Tensor],
        lowered: bool,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.use, ctx.fused = use, fused
        ctx.save_for_backward(x, weight)
        if fused.forward is None:
            return plain(x)
        if lowered:
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return fused.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("Inside square_sums a gradient cannot be differentiated again (create_graph=True).")
        use, (x, weight), needs = ctx.use, ctx.saved_tensors, ctx.needs_input_grad
        scale = float(g.shape[0] ** 2) if use.expected() else None
        with full_precision(g.device.type):
            dx, sums = ctx.fused.backward(x, weight, g, needs_input=needs[4], bias=needs[6], scale=scale)
            if scale is None or sums is None:
                return None, None, None, None, dx, None, None
            use.take(x, g, sums)
        bias = sums.bias_total.to(weight.dtype) if needs[6] and sums.bias_total is not None else None
        return None, None, None, None, dx, sums.total.to(weight.dtype), bias
