"""Σ over examples of squared gradients while a loss is computed and differentiated."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from credo.core.example_counts import EVERY, Counted
from credo.core.network.inplace_inputs import first_size
from credo.core.per_example.autograd_state import is_running
from credo.core.per_example.balance import balance_of
from credo.core.per_example.layer_hooks import tapped_forward, watched
from credo.core.per_example.layer_rules import full_precision, widened
from credo.core.per_example.module_fallback import UnitUse, unit_forward
from credo.core.per_example.outputs import OutputGradients, output_gradients
from credo.core.per_example.plan import PlanChangedError, SquarePlan
from credo.core.per_example.rnn_cells import is_recurrent
from credo.core.per_example.rnn_layers import recurrent_forward
from credo.core.per_example.tokens import are_given, are_run

# Entries of per-example gradients that may exist at once, where a parameter's uses must be added before squaring.
_CHUNK = 1 << 22

Examples = Callable[[slice], Tensor]
"""Gradients of some of the examples, [examples, *shape]."""


@contextmanager
def square_sums(plan: SquarePlan, counted: Counted = EVERY) -> Iterator[SquareSums]:
    """While open, one forward and backward pass of the batch's mean loss also sums squares of per-example gradients.

    Inside `substituted`, if weights are substituted. Layers run other forwards meanwhile; all is undone on exit, also
    after an error. Gradients arrive where they always do. `counted` says what the mean was taken over.
    """
    plan.check_modes()
    sums = SquareSums(plan, counted)
    try:
        sums.install()
        if not (plan.first_steps.passes and plan.names):
            yield sums
            return
        with output_gradients(plan.model, sums.weight(plan.names[0])) as sums.outputs:
            yield sums
    finally:
        sums.restore()


class SquareSums:
    """What the passes inside `square_sums` have brought so far."""

    def __init__(self, plan: SquarePlan, counted: Counted = EVERY) -> None:
        self.plan, self.counted = plan, counted
        self.balance = balance_of(counted)
        self.active = False
        self.uses: Counter[str] = Counter()
        self.records: dict[str, list[Examples]] = defaultdict(list)
        self.unit_uses: dict[str, list[UnitUse]] = defaultdict(list)
        self._weights: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        self._batch: tuple[int, str] | None = None
        self._inputs: list[Any] = []
        self._too_narrow: dict[str, str] = {}
        self._undo: list[tuple[dict[str, Any], str, Any]] = []
        self._handles: list[Any] = []
        self._totals: dict[str, Tensor] = {}
        self._result: dict[str, Tensor] | None = None
        self.outputs: OutputGradients | None = None

    @property
    def batch_size(self) -> int:
        """Examples in the batch."""
        if self._batch is None:
            raise RuntimeError("No layer with wanted parameters has run yet.")
        return self._batch[0]

    @property
    def examples(self) -> float:
        """What the sums are to be divided by for a mean: the batch's rows, or as many as were said to count."""
        return self.counted.of(self.batch_size)

    def result(self) -> dict[str, Tensor]:
        """Σᵢ (∂ℓᵢ/∂w)² by name, the loss being the mean of the ℓᵢ; zeros for parameters that the loss does not use.

        With weights it is Σᵢ wᵢ·(∂ℓᵢ/∂w)².

        Ends the watching. Raises `PlanChangedError` where a larger module must answer for a parameter: run the pass
        again.
        """
        if self._result is None:
            kinds = {weight.device.type for weight in self._weights.values()}
            with full_precision(kinds.pop() if len(kinds) == 1 else "cpu"):
                self._result = self._scaled(self._finish())
            if self.outputs is not None:
                self.plan.first_steps.check(self.plan.model, self.outputs, self.counted)
        return self._result

    # -- what forwards tell ------------------------------------------------------------------------------------

    def batch_or(self, size: int | None) -> int | None:
        """The batch's size if known, else this one."""
        return size if self._batch is None else self._batch[0]

    def weight(self, name: str) -> Tensor:
        """The tensor that is in a parameter's place."""
        return self._weights[name]

    def count(self, path: str, x: Tensor, dims: int, names: Iterable[str]) -> bool:
        """One more run of a layer; whether its input, of at least so many dimensions, begins with the batch."""
        problem = self._problem(path, x, dims)
        if problem is not None:
            self._too_narrow.update(dict.fromkeys(names, problem))
            return False
        again = is_running()
        for name in names:
            # Inside backward a checkpoint runs its layers once more; only if the first time was without gradients
            # (use_reentrant=True) this is the run that counts.
            if not (again and self.uses[name]):
                self.uses[name] += 1
        return True

    def _problem(self, path: str, x: Tensor, dims: int) -> str | None:
        if x.dim() < max(dims, 1):
            return f"belongs to {path or 'the network'}, whose input has no batch dimension"
        size = x.shape[0]
        if x.dim() == 1 and size == self.batch_or(size) and not self._are_tokens(path, x):
            return f"belongs to {path}, whose input seems to be the places 0, 1, 2, … and not one token an example"
        expects, first = self._begin(size, path or "the network")
        if size == expects:
            return None
        expected = f"the {expects} examples that {first} got"
        return f"belongs to {path}, whose input begins with {size} instead of {expected}"

    def _begin(self, size: int, who: str) -> tuple[int, str]:
        """The batch's size, which is this one where nobody has seen it yet, and who saw it first."""
        if self._batch is None:
            self.counted.check_rows(size)
            self._batch = (size, who)
        return self._batch

    def _are_tokens(self, path: str, x: Tensor) -> bool:
        """Whether numbers, as many as there are examples, are one token for each."""
        known = self.plan.token_layers
        if path in known or not path:  # the network's own input
            return True
        if not are_run(x):
            known.update([path] if len(x) > 1 else [])
            return True
        return are_given(x, tree_leaves(self._inputs))

    def count_unit(self, unit: Any, use: UnitUse, size: int | None) -> None:
        """One more run of a unit."""
        if use.problem is None and size is not None:
            self._begin(size, unit.title)
        if use.problem is None:
            self.unit_uses[unit.path].append(use)
        else:
            self._too_narrow.update(dict.fromkeys(unit.places, use.problem))

    def leave_to_itself(self, names: Iterable[str], problem: str) -> None:
        """A layer that cannot be looked into is a unit from the next pass on."""
        self._too_narrow.update(dict.fromkeys(names, problem))

    def _root_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **options: Any) -> Any:
            size = first_size(args, options)
            if self.active and torch.is_grad_enabled() and size is not None:
                first, _ = self._begin(size, "the network")
                self._inputs.append((args, options))
                if size != first:
                    raise ValueError(
                        f"The loss ran the network on batches of {first} and {size} examples; squares of "
                        "per-example gradients need the same examples in every call: make several steps instead."
                    )
            return original(*args, **options)

        return forward

    # -- what backward tells -----------------------------------------------------------------------------------

    def skipped(self, names: Iterable[str]) -> None:
        """A run was differentiated by its inputs only (an attack inside the loss): it was no use of the weights."""
        for name in names:
            self.uses[name] -= 1

    def put(self, name: str, squares: Tensor) -> None:
        """The squares of the only use, without the mean's 1/size."""
        if name in self._squares or name in self.records:
            raise self.came_twice(name)
        self._squares[name] = squares

    def came_twice(self, name: str) -> RuntimeError:
        """The error for a second gradient of the same use."""
        return RuntimeError(
            f"The gradient of {name} arrived twice: call backward once inside square_sums. In activation "
            "checkpointing, a layer that is used several times needs use_reentrant=False."
        )

    # -- putting in place and undoing ----------------------------------------------------------------------------

    def install(self) -> None:
        """Put forwards and watched parameters in place."""
        plan = self.plan
        self._weights = {name: place[key] for name, (place, key) in plan.places.items()}
        frozen = [name for name, tensor in self._weights.items() if not tensor.requires_grad]
        if frozen:
            raise ValueError(f"Squares are wanted for {', '.join(frozen)}, but these do not require a gradient.")
        for tap in plan.layers:
            own = tap.layer._parameters
            self._set(tap.layer.__dict__, "_parameters", watched(own, self._seen_from_outside, tap.names))
            make = recurrent_forward if is_recurrent(tap.layer) else tapped_forward
            self._set(tap.layer.__dict__, "forward", make(self, tap, own))
        for unit in plan.units.values():
            for name in unit.places:
                self._handles.append(self._weights[name].register_hook(partial(self._total_arrived, name)))
            self._set(unit.module.__dict__, "forward", unit_forward(self, unit, unit.module.forward))
        if plan.watches_root:
            self._set(plan.model.__dict__, "forward", self._root_forward(plan.model.forward))
        self.active = True

    def restore(self) -> None:
        """Undo `install`."""
        self.active = False
        for place, key, before in reversed(self._undo):
            if before is None:
                place.pop(key, None)
            else:
                place[key] = before
        self._undo.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _set(self, place: dict[str, Any], key: str, value: Any) -> None:
        self._undo.append((place, key, place.get(key)))
        place[key] = value

    def _seen_from_outside(self, name: str, weight: Tensor) -> Tensor:
        """What those get that read a weight outside of its layer's call: a view, whose gradient gives them away."""
        if not torch.is_grad_enabled():
            return weight
        view = weight.view_as(weight)
        view.register_hook(partial(self._read_outside, name))
        return view

    def _read_outside(self, name: str, gradient: Tensor) -> None:
        self._too_narrow[name] = "is read from outside of its own layer's call"

    def _total_arrived(self, name: str, gradient: Tensor) -> None:
        self._totals[name] = gradient.detach()

    # -- the end -------------------------------------------------------------------------------------------------

    def _scaled(self, squares: dict[str, Tensor]) -> dict[str, Tensor]:
        """From sums for a mean over all rows to those for the mean that was taken."""
        if not self.counted.is_plain:
            factor = (self.examples / self.batch_size) ** 2 / self.balance.mean
            torch._foreach_mul_([*squares.values()], factor)
        return squares

    def _finish(self) -> dict[str, Tensor]:
        self.restore()  # units run again now, and nobody may look
        arrived = self._squares or self.records or any(u.gradients for uses in self.unit_uses.values() for u in uses)
        if not arrived and not self._too_narrow:
            raise RuntimeError("No gradient has arrived: call loss.backward() inside square_sums, before result().")
        for name, uses in self.records.items():
            if name in self._squares:
                raise self.came_twice(name)
            self._add_up([name], [partial(_named, name, use) for use in uses])
        for path, unit in self.plan.units.items():
            self._finish_unit(unit.title, list(unit.places), [u for u in self.unit_uses[path] if u.gradients])
        if self._too_narrow:
            self.plan.widen(self._too_narrow)
            raise PlanChangedError("Other modules must answer for some parameters: run the pass again.")
        zeros = {n: torch.zeros_like(widened(w.detach())) for n, w in self._weights.items() if n not in self._squares}
        self.records.clear()
        self.unit_uses.clear()
        self._inputs.clear()
        return {name: self._squares[name] if name in self._squares else zeros[name] for name in self.plan.names}

    def _finish_unit(self, title: str, names: list[str], uses: list[UnitUse]) -> None:
        sums = self._add_up(names, [use.examples for use in uses]) if uses else {}
        low = any(use.low_precision for use in uses)
        doubtful = self._unexplained([name for name in names if name in self._totals], sums, low=low)
        # One example may round to the other side of a kink when it is run by itself: ask the whole batch.
        for mode in ("as it is", "eval") if uses else ():
            if doubtful:
                found = [use.whole(mode) for use in uses]
                doubtful = self._unexplained(doubtful, {n: sum(f[n] for f in found) for n in doubtful}, low=low)
        for name in doubtful:
            self._too_narrow.setdefault(name, f"is also used outside of {title}")

    def _unexplained(self, names: list[str], sums: Mapping[str, Any], *, low: bool) -> list[str]:
        """Parameters whose gradient in the pass is not what the runs of their unit add up to."""
        left = []
        for name in names:
            total = self._totals[name]
            epsilon = torch.finfo(torch.bfloat16 if low else total.dtype).eps
            scale = total.norm()
            if name in sums:
                scale = scale + self._squares[name].sum().sqrt() / self.batch_size
                total = total - sums[name]
            if total.norm() > epsilon**0.5 * scale:
                left.append(name)
        return left

    def _add_up(self, names: list[str], uses: list[Callable[[slice], dict[str, Tensor]]]) -> dict[str, Tensor]:
        """Squares of the examples' sums over all uses; returns the sums over the examples."""
        sizes = sum(self._weights[name].numel() for name in names)
        size = self.batch_size
        totals: dict[str, Tensor] = {}
        for start in range(0, size, step := max(1, _CHUNK // max(1, sizes))):
            part = slice(start, min(size, start + step))
            found = [use(part) for use in uses]
            for name in names:
                each = widened(sum((f[name] for f in found[1:]), start=found[0][name]))
                total, squares = each.sum(0), self.balance(each, part).square().sum(0).mul_(size * size)
                totals[name] = totals[name].add_(total) if name in totals else total
                self._squares[name] = self._squares[name].add_(squares) if name in self._squares else squares
        return totals


def _named(name: str, use: Examples, part: slice) -> dict[str, Tensor]:
    return {name: use(part)}
