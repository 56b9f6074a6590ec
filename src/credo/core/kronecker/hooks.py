"""Hooks for one forward and backward pass that also estimate its curvature.

Layers of the table get Kronecker factors, all other parameters the mean of squared per-example gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from credo.core.errors import UnsupportedModelError
from credo.core.example_counts import EVERY, Counted
from credo.core.kronecker.eigenbasis import Call, summed_squares
from credo.core.kronecker.factors import input_moments, matrix_shape, output_moments, row_count
from credo.core.kronecker.layer_rules import KroneckerLayer
from credo.core.kronecker.row_weights import CountedRows
from credo.core.network.inplace_inputs import first_size
from credo.core.network.layer_table import RULES
from credo.core.network.substitute import parameters_at
from credo.core.per_example.example_sums import example_weights
from credo.core.per_example.first_pass_checks import FirstPassChecks
from credo.core.per_example.hook_plan import PlanChangedError
from credo.core.per_example.hooks import PerExamplePass, squared_gradients
from credo.core.per_example.layer_calls import GuardedParameters
from credo.core.per_example.layer_rules import computes_gradient_of
from credo.core.per_example.output_rows import OutputGradients, output_gradients
from credo.core.per_example.plan import PerExamplePlan

Bases = Mapping[str, tuple[Tensor, Tensor]]
"""Eigenvectors of A and of G by the names of weights."""

_ADVICE = "Give such parameters a diagonal: curvature={{'diagonal': [{names}]}}"


class CurvaturePlan:
    """How each parameter's curvature is estimated: by its layer's Kronecker factors, or by a `PerExamplePlan`.

    Args:
        model: The network.
        layers: Layers with factors.
        others: All other parameters.
        aliases: All names of each parameter.
        wide: Sum the inputs of linear layers in double precision. Inputs often are almost dependent, and rounding would
            outweigh the smallest eigenvalues of A.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[KroneckerLayer],
        others: Sequence[str],
        aliases: Mapping[str, tuple[str, ...]],
        *,
        wide: bool = False,
    ) -> None:
        self.model, self.layers, self.aliases, self.wide = model, tuple(layers), aliases, wide
        self.others = tuple(others)
        self.diagonal = PerExamplePlan(model, others, aliases) if others else None
        self.first_passes = FirstPassChecks()
        if self.diagonal is not None:
            self.diagonal.first_passes = FirstPassChecks(0)  # they are checked here

    def on(self, model: nn.Module) -> CurvaturePlan:
        """The same plan for another copy of the network."""
        if model is self.model:
            return self
        plan = copy.copy(self)
        plan.model = model
        plan.layers = tuple(replace(one, layer=model.get_submodule(one.path)) for one in self.layers)
        plan.diagonal = None if self.diagonal is None else self.diagonal.on(model)
        return plan

    @contextmanager
    def outputs(self, counted: Counted, weight: Tensor) -> Iterator[OutputGradients | None]:
        """While open, record the network's outputs: in the first passes, and where they tell which rows count.

        Args:
            counted: What the loss is a mean over.
            weight: One of the tensors that the pass differentiates by.
        """
        if not (self.first_passes.passes or (counted.examples is not None and counted.weights is None)):
            yield None
            return
        with output_gradients(self.model, weight) as found:
            yield found

    @contextmanager
    def hooks(
        self,
        counted: Counted = EVERY,
        outputs: OutputGradients | None = None,
        *,
        bases: Bases = MappingProxyType({}),
    ) -> Iterator[CurvaturePass]:
        """While open, one forward and backward pass of the batch's mean loss also estimates its curvature.

        Open it inside `substituted`, if weights are substituted. The hooks are removed on exit, also after an error.

        Args:
            counted: What the loss is a mean over.
            outputs: The outputs of the same pass, which tell which rows those are.
            bases: Bases in which the layers' squared per-example gradients are wanted, too.
        """
        with ExitStack() as stack:
            diagonal = stack.enter_context(squared_gradients(self.diagonal, counted)) if self.diagonal else None
            run = CurvaturePass(self, diagonal, counted, outputs, bases)
            try:
                run.install()
                yield run
            finally:
                run.remove()


class CurvaturePass:
    """The state of one pass: second moments of inputs and output gradients so far.

    Args:
        plan: Where hooks go.
        diagonal: The pass of the parameters without factors.
        counted: What the loss is a mean over.
        outputs: The network's outputs in this pass.
        bases: Bases in which the layers' squared per-example gradients are wanted, too.
    """

    def __init__(
        self,
        plan: CurvaturePlan,
        diagonal: PerExamplePass | None,
        counted: Counted = EVERY,
        outputs: OutputGradients | None = None,
        bases: Bases = MappingProxyType({}),
    ) -> None:
        self.plan, self.diagonal, self.bases = plan, diagonal, bases
        self.layers = plan.layers
        self._rows, self._weights = CountedRows(counted, outputs), example_weights(counted)
        self._waiting: list[Callable[[], None]] = []
        self.active = False
        self.size: int | None = None
        self._moments: dict[str, tuple[Tensor, Tensor, int]] = {}
        self._calls: dict[str, list[Call]] = {}  # of layers with a basis
        self._is_first = True
        self._seen: list[tuple[Tensor, int, Tensor]] | None = None
        self._outside: set[str] = set()
        self._undo: list[Callable[[], object]] = []

    def take_all(self) -> None:
        """Take gradients also of passes that differentiate by `seen()`, and not by weights. Before the forward pass."""
        self._seen = []

    def seen(self) -> list[Tensor]:
        """What the backward pass must differentiate by, at least: outputs of layers, without gradients by weights.

        For an output that was changed in place after its layer's call it is the weight.
        """
        assert self._seen is not None
        return [weight if out._version != version else out for out, version, weight in self._seen]

    def again(self) -> None:
        """Take what arrives from here on as the gradients of another function of the same forward pass.

        G becomes the sum over these backward passes, and A stays that of the first. Not for a plan with parameters that
        have no factors: their squared gradients are those of one backward pass.
        """
        assert self.diagonal is None
        self._is_first = False

    def result(self) -> dict[str, Tensor]:
        """A and G by the layers' keys, mean squared per-example gradients by name; zeros for what is not used.

        Raises PlanChangedError if squared gradients need another pass, as `PerExamplePass.result` does.
        """
        self.remove()
        if self._outside:
            names = sorted(self._outside)
            raise UnsupportedModelError(
                f"{', '.join(names)}: read from outside of the own layer's call, where Kronecker factors do not see "
                f"it. {_advice(names)}"
            )
        while self._waiting:
            self._waiting.pop()()
        found = self._mean_squares()
        keys = [key for layer in self.layers for key in layer.keys]
        sums = [each for layer in self.layers for each in self._sums(layer)]
        factors = [total for total, _ in sums]
        self._moments.clear()
        if factors:
            torch._foreach_div_(factors, [count for _, count in sums])
        return {**dict(zip(keys, factors, strict=True)), **self._variances(), **found}

    def _sums(self, layer: KroneckerLayer) -> list[tuple[Tensor, float]]:
        """Sums for A and G, and what they are to be divided by."""
        weight = parameters_at(self.plan.model, [layer.weight])[layer.weight]
        groups, outputs, inputs = matrix_shape(layer.layer, bias=layer.bias is not None)
        if layer.weight not in self._moments:
            zeros = weight.detach().new_zeros((), dtype=_precision(weight))
            return [(zeros.expand(groups, size, size).clone(), 1.0) for size in (inputs, outputs)]
        a, g, rows = self._moments[layer.weight]
        assert self.size is not None
        if rows % self.size:
            raise UnsupportedModelError(
                f"{layer.path or 'the network'} gets {rows} rows for {self.size} examples: not the same number for "
                f"each. {_advice(layer.names)}"
            )
        # The mean's 1/n is in every gradient: with P positions each, n² Σ g gᵀ / (n·P).
        scale = self._rows.examples(self.size) * self.size / rows
        mean = 1.0 if self._weights is None else self._weights.mean
        return [(a, self._rows.total(self.size)), (g, mean / scale)]

    def _variances(self) -> dict[str, Tensor]:
        """Mean squared per-example gradients in the layers' bases."""
        found = {}
        for layer in self.layers:
            basis, calls = self.bases.get(layer.weight), self._calls.pop(layer.weight, None)
            if basis is None:
                continue
            if calls is None:
                found[layer.variances] = basis[0].new_zeros(len(basis[0]), basis[1].shape[-1], basis[0].shape[-1])
                continue
            assert self.size is not None
            if any(not len(x) == len(g) == self.size for x, g in calls):
                raise UnsupportedModelError(
                    f"{layer.path or 'the network'} gets an input that does not begin with the batch's {self.size} "
                    f"examples, so their gradients cannot be told apart for EKFAC. {_advice(layer.names)}"
                )
            squares = summed_squares(layer.layer, calls, *basis, bias=layer.bias is not None)
            mean = 1.0 if self._weights is None else self._weights.mean
            # The mean's 1/n is in every gradient: n² Σ ∇²/n.
            found[layer.variances] = squares.mul_(self._rows.examples(self.size) / mean)
        return found

    def _mean_squares(self) -> dict[str, Tensor]:
        if self.diagonal is None:
            return {}
        try:
            squares = self.diagonal.result()
        except PlanChangedError:
            raise
        except RuntimeError as error:
            # None of these parameters was used, which is no error where layers with factors were.
            if (self.layers and not self._moments) or "No gradient has arrived" not in str(error):
                raise
            parameters = parameters_at(self.plan.model, self.plan.others)
            return {name: torch.zeros_like(p.detach(), dtype=_precision(p)) for name, p in parameters.items()}
        return {name: total / self.diagonal.examples for name, total in squares.items()}

    # -- forward and backward ------------------------------------------------------------------------------------

    def _network_called(self, model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        size = first_size(args, options)
        if not torch.is_grad_enabled() or size is None:
            return
        if self.size not in (None, size):
            raise ValueError(
                f"The loss ran the network on batches of {self.size} and {size} examples; Kronecker factors need the "
                "same examples in every call: make several steps instead."
            )
        self.size = size

    def _forward(self, layer: KroneckerLayer, own: Any, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        rule = RULES[type(layer.layer)]

        def forward(*args: Any, **options: Any) -> Tensor:
            out = _with_parameters(own, layer.layer, inner, args, options)
            if not (self.active and torch.is_grad_enabled() and out.requires_grad):
                return out
            x: Tensor = args[0] if args else next(iter(options.values()))
            if x.dim() < rule.min_dim:
                raise UnsupportedModelError(
                    f"{layer.path or 'the network'} gets an input of shape {list(x.shape)}, without a batch. "
                    f"{_advice(layer.names)}"
                )
            self.size = x.shape[0] if self.size is None else self.size
            out.register_hook(partial(self._arrived, layer, own["weight"], x.detach()))
            if self._seen is not None:
                self._seen.append((out, out._version, own["weight"]))
            return out

        return forward

    def _arrived(self, layer: KroneckerLayer, weight: Tensor, x: Tensor, g: Tensor) -> None:
        """Tensor hook: the gradient by a layer's output is here."""
        if self._seen is None and not computes_gradient_of(weight):
            return  # the loss differentiates by its inputs only, for an attack, say
        assert self.size is not None
        if self._rows.are_known(self.size):
            self._take(layer, x, g.detach())
        else:
            self._waiting.append(partial(self._take, layer, x, g.detach()))

    def _take(self, layer: KroneckerLayer, x: Tensor, g: Tensor) -> None:
        assert self.size is not None
        weights = self._rows.weights(self.size)
        if weights is not None and not len(x) == len(g) == self.size:
            raise UnsupportedModelError(
                f"{layer.path or 'the network'} gets an input that begins with {len(x)} instead of the batch's "
                f"{self.size} rows, of which only some count: which of its rows those are is not known. "
                f"{_advice(layer.names)}"
            )
        dtype = _precision(cast(Tensor, layer.layer.weight))
        x, g = x.to(dtype), g.to(dtype)
        g = g if self._weights is None else self._weights(g)
        with torch.autocast(g.device.type, enabled=False):
            outputs = output_moments(layer.layer, g)
            if layer.weight in self.bases:
                self._calls.setdefault(layer.weight, []).append((x, g))
            if not self._is_first:
                self._moments[layer.weight][1].add_(outputs)
                return
            rows = row_count(layer.layer, g)
            x = x.double() if self.plan.wide and isinstance(layer.layer, nn.Linear) else x
            places, bias = rows // max(1, len(x)), layer.bias is not None
            inputs = input_moments(layer.layer, x, positions=places, bias=bias, weights=weights)
        if layer.weight in self._moments:  # several calls of one layer count as positions
            before = self._moments[layer.weight]
            inputs, outputs, rows = inputs + before[0], outputs + before[1], rows + before[2]
        self._moments[layer.weight] = (inputs, outputs, rows)

    # -- installing and removing ---------------------------------------------------------------------------------

    def install(self) -> None:
        """Install forwards, and parameters that show who reads them."""
        handle = self.plan.model.register_forward_pre_hook(self._network_called, with_kwargs=True)
        self._undo.append(handle.remove)
        for layer in self.layers:
            own, names = layer.layer._parameters, {name.rpartition(".")[2]: name for name in layer.names}
            self._set(layer.layer.__dict__, "forward", self._forward(layer, own, layer.layer.forward))
            self._set(layer.layer.__dict__, "_parameters", GuardedParameters(own, self._outside.add, names))
        self.active = True

    def remove(self) -> None:
        """Undo `install`."""
        self.active, self._seen = False, None  # outputs have hooks that have this pass: a cycle that is never freed
        while self._undo:
            self._undo.pop()()

    def _set(self, own: dict[str, Any], key: str, value: Any) -> None:
        before = own.get(key)
        undo = partial(own.pop, key, None) if before is None else partial(own.__setitem__, key, before)
        self._undo.append(undo)
        own[key] = value


def _with_parameters(
    own: Any, layer: nn.Module, inner: Callable[..., Tensor], args: tuple[Any, ...], options: dict[str, Any]
) -> Tensor:
    """Run the layer's forward, which reads its parameters as they are."""
    guarded, layer.__dict__["_parameters"] = layer.__dict__["_parameters"], own
    try:
        return inner(*args, **options)
    finally:
        layer.__dict__["_parameters"] = guarded


def _precision(tensor: Tensor) -> torch.dtype:
    """That of the parameter, single at least."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def _advice(names: Iterable[str]) -> str:
    return _ADVICE.format(names=", ".join(map(repr, names))) + "."
