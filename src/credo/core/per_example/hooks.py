"""Hooks for one forward and backward pass that also sum the squares of per-example gradients.

While hooks are installed, layers with a rule run a forward of their own. When the gradient by a layer's output arrives,
the rule gives Σᵢ (∂ℓᵢ/∂w)² over the examples. Parameters that several calls use are added up at the end
(`example_sums`); modules without a rule are run again, example by example (`module_fallback`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from credo.core.example_counts import EVERY, Counted
from credo.core.network.inplace_inputs import first_size
from credo.core.per_example.autograd_state import is_running
from credo.core.per_example.example_sums import Examples, added_up, example_weights
from credo.core.per_example.hook_plan import Forward, HookPlan, PlanChangedError
from credo.core.per_example.layer_calls import GuardedParameters, Rows
from credo.core.per_example.layer_rules import full_precision, widened
from credo.core.per_example.output_rows import OutputGradients, output_gradients
from credo.core.per_example.position_ids import are_consecutive, are_inputs


@contextmanager
def squared_gradients(plan: HookPlan, counted: Counted = EVERY) -> Iterator[PerExamplePass]:
    """While open, one forward and backward pass of the batch's mean loss also sums squared per-example gradients.

    Open it inside `substituted`, if weights are substituted. Gradients arrive where they always do. The hooks are
    removed on exit, also after an error.

    Args:
        plan: Where hooks go.
        counted: What the loss is a mean over.
    """
    if plan.modules:
        plan.check_modes()
    run = PerExamplePass(plan, counted)
    try:
        run.install()
        if not (plan.first_passes.passes and plan.names):
            yield run
            return
        with output_gradients(plan.model, run.parameters[plan.names[0]]) as run.outputs:
            yield run
    finally:
        run.remove()


class PerExamplePass:
    """The state of one pass: how often parameters were used, and the squared gradients so far.

    Args:
        plan: Where hooks go.
        counted: What the loss is a mean over.
    """

    def __init__(self, plan: HookPlan, counted: Counted = EVERY) -> None:
        self.plan, self.counted = plan, counted
        self.weights = None if counted.weights is None else example_weights(counted)
        self.active = False
        self.parameters: dict[str, Tensor] = {}
        self.uses: Counter[str] = Counter()
        self.squares: dict[str, Tensor] = {}
        self.rows: list[Rows] = []  # that are squared at the end of the backward pass
        self.several: dict[str, list[Examples]] = defaultdict(list)  # of parameters that several calls use
        self.module_calls: dict[str, list[Any]] = defaultdict(list)
        self.module_gradients: dict[str, Tensor] = {}  # of the whole batch
        self.outputs: OutputGradients | None = None
        self._batch: tuple[int, str] | None = None
        self._inputs: list[tuple[Any, list[tuple[Tensor, int]]]] = []
        self._too_narrow: dict[str, str] = {}
        self._undo: list[tuple[dict[str, Any], str, Any]] = []
        self._handles: list[Any] = []
        self._result: dict[str, Tensor] | None = None

    @property
    def batch_size(self) -> int:
        """Examples in the batch."""
        if self._batch is None:
            raise RuntimeError("No layer with wanted parameters has run yet.")
        return self._batch[0]

    @property
    def examples(self) -> float:
        """What the sums are to be divided by for a mean: the batch's rows, or the number of those that count."""
        return float(self.batch_size) if self._is_plain else self.counted.of(self.batch_size)

    @property
    def _is_plain(self) -> bool:
        return self.counted.examples is None and self.weights is None

    def result(self) -> dict[str, Tensor]:
        """Σᵢ wᵢ·(∂ℓᵢ/∂w)² by name, wᵢ = 1 without weights; zeros for parameters that the loss does not use.

        Removes the hooks. Raises PlanChangedError if a larger module must be run for some parameters: run the pass
        again.
        """
        if self._result is None:
            self._result = self._finish()
            if self.outputs is not None:
                self.plan.first_passes.check(self.plan.model, self.outputs, self.counted)
        return self._result

    def _finish(self) -> dict[str, Tensor]:
        self.remove()  # modules run again now, without hooks
        called = any(call.gradients for calls in self.module_calls.values() for call in calls)
        if not (self.squares or self.several or called or self._too_narrow):
            raise RuntimeError("No gradient has arrived: call loss.backward() inside squared_gradients.")
        if self.several or self.plan.modules:
            self._finish_slowly()
        if self._too_narrow:
            self.plan.widen(self._too_narrow)
            changed = [(t, t._version) for _, before in self._inputs for t, version in before if t._version != version]
            raise PlanChangedError("Other modules must be run for some parameters: run the pass again.", changed)
        zeros = {
            name: torch.zeros_like(widened(parameter.detach()))
            for name, parameter in self.parameters.items()
            if name not in self.squares
        }
        found = {name: self.squares[name] if name in self.squares else zeros[name] for name in self.plan.names}
        if not self._is_plain:  # from sums for a mean over all rows to those for the mean that was taken
            factor = (self.examples / self.batch_size) ** 2 / (1.0 if self.weights is None else self.weights.mean)
            torch._foreach_mul_([*found.values()], factor)
        self.several.clear()
        self.module_calls.clear()
        self._inputs.clear()
        return found

    def _finish_slowly(self) -> None:
        """Parameters that several calls use, and modules that are run again."""
        kinds = {parameter.device.type for parameter in self.parameters.values()}
        with full_precision(kinds.pop() if len(kinds) == 1 else "cpu"):
            for name, calls in self.several.items():
                if name in self.squares:
                    raise self.came_twice(name)
                self.add_up([name], [partial(_named, name, call) for call in calls])
            self.plan.finish_modules(self)

    def add_up(self, names: list[str], calls: Sequence[Callable[[slice], Mapping[str, Tensor]]]) -> dict[str, Tensor]:
        """Add squares of gradients that are sums over several calls; returns the gradients' sums over the examples.

        Args:
            names: The parameters.
            calls: For each call, a function that gives their gradients for some of the examples.
        """
        entries = sum(self.parameters[name].numel() for name in names)
        totals, squares = added_up(names, calls, entries, self.batch_size, self.weights)
        self.squares |= squares
        return totals

    # -- installing and removing ---------------------------------------------------------------------------------

    def install(self) -> None:
        """Install forwards, and parameters that show who reads them."""
        plan = self.plan
        self.parameters = {name: own[key] for name, (own, key) in plan.owners.items()}
        frozen = [name for name, tensor in self.parameters.items() if not tensor.requires_grad]
        if frozen:
            raise ValueError(
                f"Squared gradients are wanted for {', '.join(frozen)}, but these do not require a gradient."
            )
        forwards = [hooked.forward(self, hooked, hooked.layer._parameters) for hooked in plan.layers]
        owners = [pair for hooked in plan.layers for pair in hooked.owners]
        guards = [GuardedParameters(owner._parameters, self._read_outside, names) for owner, names in owners]
        for hooked, forward in zip(plan.layers, forwards, strict=True):
            self._set(hooked.layer.__dict__, "forward", forward)
        for (owner, _), guarded in zip(owners, guards, strict=True):
            self._set(owner.__dict__, "_parameters", guarded)
        for module in plan.modules.values():
            for name in module.inside:
                self._handles.append(self.parameters[name].register_hook(partial(self._module_gradient, name)))
            self._set(module.module.__dict__, "forward", module.forward(self, module, module.module.forward))
        if plan.hooks_network:
            self._set(plan.model.__dict__, "forward", self._network_forward(plan.model.forward))
        self.active = True

    def remove(self) -> None:
        """Undo `install`."""
        self.active = False
        for own, key, before in reversed(self._undo):
            if before is None:
                own.pop(key, None)
            else:
                own[key] = before
        self._undo.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _set(self, own: dict[str, Any], key: str, value: Any) -> None:
        self._undo.append((own, key, own.get(key)))
        own[key] = value

    def _module_gradient(self, name: str, gradient: Tensor) -> None:
        self.module_gradients[name] = gradient.detach()

    def _read_outside(self, name: str) -> None:
        self.too_narrow([name], "is read from outside of its own layer's call")

    # -- forward -------------------------------------------------------------------------------------------------

    def _network_forward(self, original: Forward) -> Forward:
        def forward(*args: Any, **options: Any) -> Any:
            first = args[0] if args else None
            size = first.shape[0] if isinstance(first, Tensor) and first.dim() else first_size(args, options)
            if self.active and torch.is_grad_enabled() and size is not None:
                expected, _ = self.begin(size, "the network")
                tensors = [t for t in (*args, *options.values()) if isinstance(t, Tensor) and not t.is_inference()]
                self._inputs.append(((args, options), [(t, t._version) for t in tensors]))
                if size != expected:
                    raise ValueError(
                        f"The loss ran the network on batches of {expected} and {size} examples; squared per-example "
                        "gradients need the same examples in every call: make several steps instead."
                    )
            return original(*args, **options)

        return forward

    def begin(self, size: int, who: str) -> tuple[int, str]:
        """The batch's size, which is `size` if none is known yet, and who saw it first."""
        if self._batch is None:
            if self.weights is not None:
                self.counted.check_rows(size)
            self._batch = (size, who)
        return self._batch

    def batch_or(self, size: int | None) -> int | None:
        """The batch's size if known, else this one."""
        return size if self._batch is None else self._batch[0]

    def count(self, path: str, x: Tensor, dims: int, names: Iterable[str]) -> bool:
        """Count one more call of a layer; whether its input begins with the batch.

        Args:
            path: The layer's name in the network.
            x: Its input.
            dims: Dimensions that the input must have at least.
            names: Its parameters.
        """
        problem = self._problem(path, x, dims)
        if problem is not None:
            self.too_narrow(names, problem)
            return False
        for name in names:
            # Inside backward a checkpoint runs its layers once more; only if the first time was without gradients
            # (use_reentrant=True) this is the run that counts.
            if not (self.uses[name] and is_running()):
                self.uses[name] += 1
        return True

    def _problem(self, path: str, x: Tensor, dims: int) -> str | None:
        if x.dim() < max(dims, 1):
            return f"belongs to {path or 'the network'}, whose input has no batch dimension"
        size = x.shape[0]
        if x.dim() == 1 and size == self.batch_or(size) and not self._are_tokens(path, x):
            return f"belongs to {path}, whose input seems to be the positions 0, 1, 2, … and not one token an example"
        expected, first = self.begin(size, path or "the network")
        if size == expected:
            return None
        return f"belongs to {path}, whose input begins with {size} instead of the {expected} examples that {first} got"

    def _are_tokens(self, path: str, x: Tensor) -> bool:
        """Whether indices, as many as there are examples, are one token for each."""
        known = self.plan.token_layers
        if path in known or not path:  # the network's own input
            return True
        if not are_consecutive(x):
            known.update([path] if len(x) > 1 else [])
            return True
        return are_inputs(x, tree_leaves([given for given, _ in self._inputs]))

    def too_narrow(self, names: Iterable[str], problem: str) -> None:
        """From the next pass on, run a larger module for these parameters; the first reason given is the one told."""
        for name in names:
            self._too_narrow.setdefault(name, problem)

    # -- backward ------------------------------------------------------------------------------------------------

    def skip(self, names: Iterable[str]) -> None:
        """A call was differentiated by its inputs only (an attack inside the loss): it does not use the weights."""
        for name in names:
            self.uses[name] -= 1

    def put(self, name: str, squares: Tensor) -> None:
        """Take the squares of a parameter that one call uses, without the mean's 1/size."""
        if name in self.squares or name in self.several:
            raise self.came_twice(name)
        self.squares[name] = squares

    def came_twice(self, name: str) -> RuntimeError:
        """The error for a second gradient of the same call."""
        return RuntimeError(
            f"The gradient of {name} arrived twice: call backward once inside squared_gradients. In activation "
            "checkpointing, a layer that is used several times needs use_reentrant=False."
        )


def _named(name: str, call: Examples, part: slice) -> dict[str, Tensor]:
    return {name: call(part)}
