"""Estimates of the curvature while a loss is computed and differentiated: Kronecker factors, squares for the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from credo.core.errors import UnsupportedModelError
from credo.core.example_counts import EVERY, Counted
from credo.core.kronecker.factors import matrix_shape, moment_sums
from credo.core.kronecker.layer_rules import KroneckerLayer
from credo.core.kronecker.row_weights import CountedRows
from credo.core.network.inplace_inputs import first_size
from credo.core.network.layer_table import RULES
from credo.core.network.substitute import parameters_at
from credo.core.per_example.accumulate import SquareSums, square_sums
from credo.core.per_example.autograd_state import computes_gradient_of
from credo.core.per_example.balance import balance_of
from credo.core.per_example.first_steps import FirstSteps
from credo.core.per_example.layer_hooks import watched
from credo.core.per_example.outputs import OutputGradients, output_gradients
from credo.core.per_example.plan import PlanChangedError, SquarePlan

_ADVICE = "Give such parameters a diagonal: diagonal=[{names}]"


class CurvaturePlan:
    """Who answers for which parameter: layers with factors, and a `SquarePlan` for all other names."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[KroneckerLayer],
        others: Sequence[str],
        aliases: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.model, self.layers, self.aliases = model, tuple(layers), aliases
        self.others = tuple(others)
        self.squares = SquarePlan(model, others, aliases) if others else None
        self.first_steps = FirstSteps()
        if self.squares is not None:
            self.squares.first_steps = FirstSteps(0)  # they are looked at here

    def on(self, model: nn.Module) -> CurvaturePlan:
        """The same plan for another copy of the network."""
        if model is self.model:
            return self
        plan = copy.copy(self)
        plan.model = model
        plan.layers = tuple(replace(tap, layer=model.get_submodule(tap.path)) for tap in self.layers)
        plan.squares = None if self.squares is None else self.squares.on(model)
        return plan

    @contextmanager
    def outputs(self, counted: Counted, weight: Tensor) -> Iterator[OutputGradients | None]:
        """While open, the network's outputs are watched, in the first steps and where they say which rows count.

        `weight` is one of the tensors that the pass differentiates by.
        """
        if not (self.first_steps.passes or (counted.examples is not None and counted.weights is None)):
            yield None
            return
        with output_gradients(self.model, weight) as found:
            yield found

    @contextmanager
    def watched(self, counted: Counted = EVERY, outputs: OutputGradients | None = None) -> Iterator[Watch]:
        """While open, one forward and backward pass of the batch's mean loss also brings its curvature.

        Inside `substituted`, if weights are substituted. All is undone on exit, also after an error. `counted` says
        what the mean is taken over, `outputs` of the same pass which rows those are.
        """
        with ExitStack() as stack:
            sums = stack.enter_context(square_sums(self.squares, counted)) if self.squares else None
            watch = Watch(self, sums, counted, outputs)
            try:
                watch.install()
                yield watch
            finally:
                watch.restore()


class Watch:
    """What a pass inside `CurvaturePlan.watched` has brought."""

    def __init__(
        self,
        plan: CurvaturePlan,
        sums: SquareSums | None,
        counted: Counted = EVERY,
        outputs: OutputGradients | None = None,
    ) -> None:
        self.plan, self.sums = plan, sums
        self._rows, self._balance = CountedRows(counted, outputs), balance_of(counted)
        self._waiting: list[Callable[[], None]] = []
        self.active = False
        self.size: int | None = None
        self._moments: dict[str, tuple[Tensor, Tensor, int]] = {}
        self._outside: set[str] = set()
        self._undo: list[Callable[[], object]] = []

    def result(self) -> dict[str, Tensor]:
        """A and G by the layers' keys, mean squares of single examples' gradients by name; zeros for what is not used.

        Raises `PlanChangedError` where squares need another pass, as `SquareSums.result` does.
        """
        self.restore()
        if self._outside:
            names = sorted(self._outside)
            raise UnsupportedModelError(
                f"{', '.join(names)}: read from outside of the own layer's call, where Kronecker factors do not see "
                f"it. {_advice(names)}"
            )
        while self._waiting:
            self._waiting.pop()()
        found: dict[str, Tensor] = {}
        for tap in self.plan.layers:
            found.update(zip(tap.keys, self._factors(tap), strict=True))
        return {**found, **self._squares()}

    def _factors(self, tap: KroneckerLayer) -> tuple[Tensor, Tensor]:
        weight = parameters_at(self.plan.model, [tap.weight])[tap.weight]
        groups, outputs, inputs = matrix_shape(tap.layer, bias=tap.bias is not None)
        if tap.weight not in self._moments:
            zeros = weight.detach().new_zeros((), dtype=_precision(weight))
            return zeros.expand(groups, inputs, inputs).clone(), zeros.expand(groups, outputs, outputs).clone()
        a, g, rows = self._moments[tap.weight]
        assert self.size is not None
        if rows % self.size:
            raise UnsupportedModelError(
                f"{tap.path or 'the network'} gets {rows} rows for {self.size} examples: not the same number for each. "
                f"{_advice(tap.names)}"
            )
        # The mean's 1/n is in every gradient: with P positions each, n² Σ g gᵀ / (n·P).
        scale = self._rows.examples(self.size) * self.size / rows
        return a / self._rows.total(self.size), g * (scale / self._balance.mean)

    def _squares(self) -> dict[str, Tensor]:
        if self.sums is None:
            return {}
        try:
            squares = self.sums.result()
        except PlanChangedError:
            raise
        except RuntimeError as error:
            # None of these parameters was used, which is no error where layers with factors were.
            if not self._moments or "No gradient has arrived" not in str(error):
                raise
            parameters = parameters_at(self.plan.model, self.plan.others)
            return {name: torch.zeros_like(p.detach(), dtype=_precision(p)) for name, p in parameters.items()}
        return {name: total / self.sums.examples for name, total in squares.items()}

    # -- what passes tell --------------------------------------------------------------------------------------------

    def _root_called(self, model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        size = first_size(args, options)
        if not torch.is_grad_enabled() or size is None:
            return
        if self.size not in (None, size):
            raise ValueError(
                f"The loss ran the network on batches of {self.size} and {size} examples; Kronecker factors need the "
                "same examples in every call: make several steps instead."
            )
        self._rows.counted.check_rows(size)
        self.size = size

    def _forward(self, tap: KroneckerLayer, own: Any, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        layer, rule = tap.layer, RULES[type(tap.layer)]

        def forward(*args: Any, **options: Any) -> Tensor:
            out = _with_parameters(own, layer, inner, args, options)
            if not (self.active and torch.is_grad_enabled() and out.requires_grad):
                return out
            x: Tensor = args[0] if args else next(iter(options.values()))
            if x.dim() < rule.min_dim:
                raise UnsupportedModelError(
                    f"{tap.path or 'the network'} gets an input of shape {list(x.shape)}, without a batch. "
                    f"{_advice(tap.names)}"
                )
            self.size = x.shape[0] if self.size is None else self.size
            out.register_hook(partial(self._arrived, tap, own["weight"], x.detach()))
            return out

        return forward

    def _arrived(self, tap: KroneckerLayer, weight: Tensor, x: Tensor, g: Tensor) -> None:
        """Tensor hook: the gradient by a layer's output is here."""
        if not computes_gradient_of(weight):  # the loss differentiates by its inputs only, for an attack, say
            return
        assert self.size is not None
        if self._rows.are_known(self.size):
            self._take(tap, x, g.detach())
        else:
            self._waiting.append(partial(self._take, tap, x, g.detach()))

    def _take(self, tap: KroneckerLayer, x: Tensor, g: Tensor) -> None:
        assert self.size is not None
        weights = self._rows.weights(self.size)
        if weights is not None and not len(x) == len(g) == self.size:
            raise UnsupportedModelError(
                f"{tap.path or 'the network'} gets an input that begins with {len(x)} instead of the batch's "
                f"{self.size} rows, of which only some count: which of its rows those are is not known. "
                f"{_advice(tap.names)}"
            )
        dtype = _precision(cast(Tensor, tap.layer.weight))
        x, g = x.to(dtype), self._balance(g.to(dtype))
        with torch.autocast(g.device.type, enabled=False):
            a, b, rows = moment_sums(tap.layer, x, g, bias=tap.bias is not None, weights=weights)
        if tap.weight in self._moments:  # uses of one layer count as positions
            before = self._moments[tap.weight]
            a, b, rows = a + before[0], b + before[1], rows + before[2]
        self._moments[tap.weight] = (a, b, rows)

    # -- putting in place and undoing --------------------------------------------------------------------------------

    def install(self) -> None:
        """Put forwards and watched weights in place."""
        root = self.plan.model.register_forward_pre_hook(self._root_called, with_kwargs=True)
        self._undo.append(root.remove)
        for tap in self.plan.layers:
            own, names = tap.layer._parameters, {name.rpartition(".")[2]: name for name in tap.names}
            self._set(tap.layer.__dict__, "forward", self._forward(tap, own, tap.layer.forward))
            self._set(tap.layer.__dict__, "_parameters", watched(own, self._seen_from_outside, names))
        self.active = True

    def restore(self) -> None:
        """Undo `install`."""
        self.active = False
        while self._undo:
            self._undo.pop()()

    def _seen_from_outside(self, name: str, weight: Tensor) -> Tensor:
        """What those get that read a weight outside of its layer's call: a view, whose gradient gives them away."""
        if not torch.is_grad_enabled():
            return weight
        view = weight.view_as(weight)
        view.register_hook(lambda _: self._outside.add(name))
        return view

    def _set(self, place: dict[str, Any], key: str, value: Any) -> None:
        before = place.get(key)
        undo = partial(place.pop, key, None) if before is None else partial(place.__setitem__, key, before)
        self._undo.append(undo)
        place[key] = value


def _with_parameters(
    own: Any, layer: nn.Module, inner: Callable[..., Tensor], args: tuple[Any, ...], options: dict[str, Any]
) -> Tensor:
    """The layer's forward with its parameters as they are, which nobody watches."""
    seen, layer.__dict__["_parameters"] = layer.__dict__["_parameters"], own
    try:
        return inner(*args, **options)
    finally:
        layer.__dict__["_parameters"] = seen


def _precision(tensor: Tensor) -> torch.dtype:
    """That of the parameter, single at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _advice(names: Iterable[str]) -> str:
    return _ADVICE.format(names=", ".join(map(repr, names))) + "."
