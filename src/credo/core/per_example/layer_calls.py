"""Layers with a rule during one pass: their forward, and what waits for the gradient by its output.

Where an example has one row at a layer, its gradient by the weight of a linear layer is the outer product g aᵀ, and by
a bias it is g. So the sums over the examples are Σ (g aᵀ)² = (g∘g)ᵀ(a∘a) and Σ g∘g, and the rows g of all layers are
squared and summed as one matrix, in a few operators at the end of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from credo.core.kernels.common import Sums
from credo.core.kernels.flat import zero
from credo.core.network.layer_table import EXAMPLE_GRADIENTS
from credo.core.per_example.hook_plan import Forward, HookedLayer
from credo.core.per_example.layer_rules import (
    ExampleGradients,
    computes_gradient_of,
    full_precision,
    fused_forward,
    widened,
)

if TYPE_CHECKING:
    from credo.core.per_example.hooks import PerExamplePass


class GuardedParameters(dict[str, Any]):
    """A layer's parameters for everybody but the layer itself.

    Wanted ones are views, which report when a gradient arrives: somebody has used them outside of the layer's call.

    Args:
        own: The layer's parameters.
        report: Called with the parameter's name.
        names: Names in the network of the wanted parameters.
    """

    def __init__(self, own: dict[str, Any], report: Callable[[str], None], names: Mapping[str, str]) -> None:
        super().__init__(own)
        self._own, self._report, self._names = own, report, names

    def __getitem__(self, key: str) -> Any:
        tensor = super().__getitem__(key)
        if key not in self._names or tensor is None or not torch.is_grad_enabled():
            return tensor
        view = tensor.view_as(tensor)
        view.register_hook(lambda _: self._report(self._names[key]))
        return view

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._own[key] = value

    def get(self, key: str, default: Any = None) -> Any:
        """As of any dictionary."""
        return dict(self.items()).get(key, default)

    def items(self) -> Any:
        """As of any dictionary."""
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        """As of any dictionary."""
        return [self[key] for key in self]


# -- one layer ---------------------------------------------------------------------------------------------------------


def layer_forward(run: PerExamplePass, hooked: HookedLayer, own: dict[str, Any]) -> Forward:
    """The forward of a layer with a rule, for one pass.

    Args:
        run: The pass.
        hooked: The layer.
        own: Its parameters.
    """
    layer = hooked.layer
    plain = plain_forward(layer, own)
    names = tuple(hooked.names.values())
    has_weight = "weight" in hooked.names

    def forward(*args: Any, **options: Any) -> Tensor:
        if not (run.active and torch.is_grad_enabled()):
            return plain(*args, **options)  # type: ignore[no-any-return]
        x: Tensor = args[0] if args else next(iter(options.values()))
        rule = hooked.rule or EXAMPLE_GRADIENTS[type(layer)](layer)
        if not run.count(hooked.path, x, rule.dims, names):
            return plain(*args, **options)  # type: ignore[no-any-return]
        call, fused = LayerCall(run, hooked.names, rule, own), rule.fused
        # Where rows have weights, which only the squares know of, gradient and squares cannot be made together.
        fits = has_weight and run.weights is None
        if fused is not None and fits and x.dim() >= fused.dims and (not fused.suits or fused.suits(x, own["weight"])):
            return fused_forward(call, fused, x, own, plain)
        out: Tensor = plain(*args, **options)
        if out.requires_grad:
            call.x = x if has_weight else None
            call.wait_at(out)
        return out

    return forward


def plain_forward(layer: nn.Module, own: dict[str, Any]) -> Forward:
    """The layer's own forward, which reads its parameters as they are.

    Args:
        layer: The layer.
        own: Its parameters.
    """
    original: Any = type(layer).forward
    attributes = layer.__dict__

    def plain(*args: Any, **options: Any) -> Any:
        guarded = attributes["_parameters"]
        attributes["_parameters"] = own
        try:
            return original(layer, *args, **options)
        finally:
            attributes["_parameters"] = guarded

    return plain


class LayerCall:
    """One call of a layer, which waits for the gradient by its output.

    Args:
        run: The pass.
        names: Names in the network of the wanted parameters, by `"weight"` and `"bias"`.
        rule: The layer's rule in its present mode.
        own: The layer's parameters.
    """

    __slots__ = ("index", "names", "own", "rule", "run", "shape", "x")

    def __init__(
        self, run: PerExamplePass, names: Mapping[str, str], rule: ExampleGradients, own: dict[str, Any]
    ) -> None:
        self.run, self.names, self.rule, self.own = run, names, rule, own
        self.x: Tensor | None = None

    def wait_at(self, out: Tensor) -> None:
        """Wait for the gradient by the layer's output as it is now: an activation may change it in place."""
        # Changed in place, a view gets another node in the graph, and only what it is a view of keeps its own.
        made = out._base if out._is_view() and out._base is not None else out
        node = made.grad_fn
        assert node is not None
        self.index, self.shape = made.output_nr, out.shape
        node.register_prehook(self._arrived)

    def _arrived(self, gradients: tuple[Tensor | None, ...]) -> None:
        g = gradients[self.index]
        if g is not None:
            self.take(self.x, g.detach().reshape(self.shape))

    def expected(self) -> bool:
        """Whether the backward pass that is running computes gradients by the weights, not only by inputs."""
        expected = computes_gradient_of(self.own[next(iter(self.names))])
        if not expected:
            self.run.skip(self.names.values())
        return expected

    def take(self, x: Tensor | None, g: Tensor, sums: Sums | None = None) -> None:
        """Give the pass the squares of parameters that only this call uses, and else each example's gradients.

        Args:
            x: The layer's input; None if no weight is wanted.
            g: The gradient by its output.
            sums: Squares that a fused backward pass has found; without them it is not known if they are `expected`.
        """
        run, names = self.run, self.names
        single = {key: name for key, name in names.items() if run.uses[name] == 1}
        found = {} if sums is None else {"weight": sums.squares, "bias": sums.bias_squares}
        if sums is None and not self.expected():
            return
        self.x = None
        if x is None and "weight" in names:
            raise run.came_twice(names["weight"])
        x = None if x is None else x.detach()
        g = g if g.dtype is torch.float32 else widened(g)
        for key, name in names.items():
            if key not in single:  # added before they are squared, and weighted then
                run.several[name].append(self.rule.examples(key, x, g))
        if (rows := self._rows(single, x, g, sums)) is not None:
            if not run.rows:  # squared not later than the backward pass: then somebody may write into inputs again
                torch.autograd.Variable._execution_engine.queue_callback(partial(square_rows, run))
            run.rows.append(rows)
            single = {key: name for key, name in single.items() if key not in rows.names}
        missing = [key for key in single if found.get(key) is None]
        if missing:
            once = g if run.weights is None else run.weights(g)
            found |= self.rule.squares(missing, x if "weight" in missing else None, once, float(g.shape[0] ** 2))
        for key, name in single.items():
            run.put(name, found[key])  # type: ignore[arg-type]

    def _rows(self, single: Mapping[str, str], x: Tensor | None, g: Tensor, sums: Sums | None) -> Rows | None:
        """The parameters whose squares are those of rows, and these rows; None if there are none."""
        if sums is not None:
            each = sums.bias_rows
            return Rows({"bias": single["bias"]}, None, each) if each is not None and "bias" in single else None
        if not (single and self.rule.is_outer and g.dim() == 2):
            return None
        a = x if "weight" in single else None
        a = a if a is None or a.dtype is torch.float32 else widened(a)
        return Rows(single, a, g if self.run.weights is None else self.run.weights(g))


# -- layers with one row an example ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """What arrived at one layer, in single precision or wider.

    Attributes:
        names: Names in the network of the wanted parameters, by `"weight"` and `"bias"`.
        a: The layer's inputs [examples, in]; None if no weight is wanted.
        g: The gradients by its outputs, or of its bias, [examples, out].
    """

    names: Mapping[str, str]
    a: Tensor | None
    g: Tensor


@torch.no_grad()
def square_rows(run: PerExamplePass) -> None:
    """Give the pass the sums of squares of the rows that have arrived, times examples²."""
    alike: dict[tuple[torch.device, torch.dtype, int], list[Rows]] = {}
    for rows in run.rows:
        alike.setdefault((rows.g.device, rows.g.dtype, len(rows.g)), []).append(rows)
    run.rows.clear()
    for (device, dtype, examples), group in alike.items():
        with full_precision(device.type):
            whole = torch.cat([rows.g for rows in group], 1) if len(group) > 1 else group[0].g
            squared = torch.addcmul(zero(device, dtype), whole, whole, value=float(examples) ** 2)
            inputs = [rows.a for rows in group if rows.a is not None]
            squared_inputs = iter(torch._foreach_mul(inputs, inputs) if inputs else ())
            sizes = [rows.g.shape[1] for rows in group]
            for rows, part, by_bias in zip(group, squared.split(sizes, 1), squared.sum(0).split(sizes), strict=True):
                if rows.a is not None:
                    run.put(rows.names["weight"], torch.mm(part.t(), next(squared_inputs)))
                if "bias" in rows.names:
                    run.put(rows.names["bias"], by_bias)
