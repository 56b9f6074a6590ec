"""Natural-gradient posteriors as `torch.optim.Optimizer` objects, for loops that somebody else wrote.

`optimizer.step(closure)` runs the closure with a draw in the network's place; schedulers change the rate as ever. The
posterior behind an optimiser is its attribute `posterior`: predict, evaluate and save with that.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from credo import methods
from credo.core.arguments import Group
from credo.core.example_counts import Counted
from credo.core.network.batchnorm import frozen_statistics, statistics_kept_on_error
from credo.core.network.inplace_inputs import InputWatch
from credo.core.per_example.hook_plan import PlanChangedError
from credo.core.posterior import Posterior, Terms
from credo.methods.natural.point_estimate import current_names
from credo.methods.natural.validate import check_loss

Closure = Callable[[], Any]


class _EmptyClosureError(RuntimeError):
    """A closure returned no loss and left no gradient."""


class PosteriorOptimizer(torch.optim.Optimizer):
    """Use a posterior that gathers passes and updates (VOGN, OGN, IVON, K-FAC) as a torch optimiser of its network.

    Gradients belong to the draw, not to the network's parameters, and are gone when the closure or the `sampled_params`
    block ends: a `GradScaler` or a clipping of gradients outside cannot see them. bfloat16 autocast needs no scaler.
    Which parameters are trained is decided at construction: freezing one later has no effect.

    Args:
        posterior: A posterior with `gather`, `trial` and `update`.
    """

    def __init__(self, posterior: Posterior) -> None:
        for needed in ("gather", "trial", "update"):
            if not hasattr(posterior, needed):
                raise ValueError(
                    f"{type(posterior).__name__} has a torch optimiser of its own: use it with its step()."
                )
        given = posterior.config().get("lr")
        if given == 0:
            raise ValueError("lr=0 would stay 0: give the largest rate and let a schedule or group['lr'] lower it.")
        self.posterior: Any = posterior
        self.terms: Terms | None = None
        # Rates by name keep their proportions: the group's rate is then a factor.
        self._unit = float(given) if isinstance(given, int | float) else 1.0
        self._by_name = not isinstance(given, int | float)
        self._in_use = False
        parameters = [p for p in posterior.model.parameters() if p.requires_grad]
        super().__init__([{"params": parameters}], {"lr": self._unit})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError after construction: a posterior belongs to the network it was made for.

        Args:
            param_group: The group.
        """
        if self.param_groups:
            raise ValueError(
                "This optimiser trains all of its network as one group: give values by name, lr={'head.*': 0.1, '*': "
                "0.01} and prior_precision={'*.bias': 1.0, '*': 10.0}, or make a new optimiser for another network."
            )
        super().add_param_group(param_group)

    def step(
        self, closure: Closure | None = None, *, examples: float | None = None, weights: Tensor | None = None
    ) -> Any:
        """Update from what was gathered; with a closure, gather its passes first. Returns the closure's loss.

        If anything fails, nothing has changed and nothing stays gathered.

        Args:
            closure: Computes the batch's mean loss on the network as it finds it, and may call `backward` or leave it
                to the optimiser. With several draws a step it is called once for each.
            examples: The number that the closure's mean was divided by, as `Posterior.step` takes it.
            weights: How often each row counts in the closure's loss, [rows], likewise.
        """
        counted = Counted(examples, weights)
        if closure is None and not counted.is_plain:
            raise ValueError("examples= and weights= belong to a pass: give them with a closure, or to sampled_params.")
        posterior, gathered = self.posterior, self.posterior._gathered
        if closure is None and not gathered.count and not self._in_use:
            raise RuntimeError(
                "Nothing was gathered: give step() a closure, or run forward and backward inside "
                "`with optimizer.sampled_params(train=True):` before it."
            )
        self._check_other_gradients()
        kept = statistics_kept_on_error(posterior.model)
        with self._alone(), kept, gathered.dropped_on_error(self.posterior.process_group):
            posterior.lr_scale = float(self.param_groups[0]["lr"]) / self._unit
            loss = None if closure is None else self._passes(closure, counted)
            self.terms = posterior.update()
            return loss

    def gather(self, closure: Closure, *, examples: float | None = None, weights: Tensor | None = None) -> Any:
        """The first half of `step(closure)`: its passes count for the next `step()`. For loops that call that alone.

        Args:
            closure: As in `step`.
            examples: The number that the closure's mean was divided by.
            weights: How often each row counts in the closure's loss, [rows].
        """
        self._check_other_gradients()
        kept = statistics_kept_on_error(self.posterior.model)
        with self._alone(), kept, self.posterior._gathered.dropped_on_error(self.posterior.process_group):
            return self._passes(closure, Counted(examples, weights))

    def sampled_params(
        self, train: bool = False, *, examples: float | None = None, weights: Tensor | None = None
    ) -> AbstractContextManager[nn.Module]:
        """Load one draw into the network while open.

        Args:
            train: Run zero_grad, forward and backward inside: the gradients count for the next `step()`; several
                blocks before one step are gradient accumulation.
            examples: The number that the mean loss inside was divided by, as in `step`.
            weights: How often each row counts in the loss inside, [rows], as in `step`.
        """
        return self._trial(Counted(examples, weights)) if train else self._sampled()

    def state_dict(self) -> dict[str, Any]:
        """Rate, momentum, curvature, generator, step count; the network's own weights are not in it."""
        state = self.posterior.state_dict()
        own = {key: value for key, value in state.items() if not key.startswith("model.")}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        method = type(self.posterior).__name__
        return {"posterior": copy.deepcopy(own), "param_groups": groups, "by_name": self._by_name, "method": method}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was called, once the network's weights are loaded, too.

        The learning rate is the saved one, whatever `lr` this optimiser was made with; rates by name are its own.

        Args:
            state_dict: What `state_dict()` returned.
        """
        own = {key for key in self.posterior.state_dict() if not key.startswith("model.")}
        methods = [state_dict.get("method", type(self.posterior).__name__), type(self.posterior).__name__]
        if methods[0] != methods[1]:
            raise ValueError(f"This state is of another optimiser or network: of {methods[0]}, not of {methods[1]}.")
        given = current_names(self.posterior, state_dict.get("posterior", {}))
        if set(given) != own:
            wrong = sorted(own.symmetric_difference(given))
            raise ValueError(f"This state is of another optimiser or network; not on both sides: {', '.join(wrong)}.")
        if state_dict.get("by_name", self._by_name) != self._by_name:
            kinds = ("one number", "rates by name")
            raise ValueError(
                f"This state was saved with {kinds[not self._by_name]} as lr, and this optimiser has "
                f"{kinds[self._by_name]}: make it with the same kind."
            )
        self.posterior.load_state_dict(copy.deepcopy(given), strict=False)
        for group, values in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(values)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have a posterior, and so a network, of their own."""
        own = {"posterior": self.posterior, "terms": self.terms, "_unit": self._unit, "_by_name": self._by_name}
        return {**super().__getstate__(), **own, "_in_use": False}

    def _check_other_gradients(self) -> None:
        """Raise RuntimeError if the network has gradients: a loop that accumulates there would lose them."""
        if any(p.grad is not None and bool(p.grad.any()) for p in self.param_groups[0]["params"]):
            raise RuntimeError(
                "The network's own parameters have gradients, from a backward pass outside of step(closure) and of "
                "sampled_params(train=True): they cannot count, being the mean's and not a draw's. Accumulate by "
                "several blocks before one step(); if they are not meant for it, call zero_grad() before step()."
            )

    def _passes(self, closure: Closure, counted: Counted) -> Any:
        loss, generator, has_blocks = None, self.posterior.generator, self.posterior._gathered.count > 0
        before, watch = generator.get_state(), InputWatch()
        for count in range(_wanted(self.posterior)):
            try:
                loss = self._run(closure, watch, counted, inner=count > 0)
            except _EmptyClosureError:
                # Lightning makes step() after blocks of one's own a step with a closure that does nothing.
                if count or not has_blocks:
                    raise
                generator.set_state(before)
                return None
        return loss

    def _run(self, closure: Closure, watch: InputWatch, counted: Counted, *, inner: bool) -> Any:
        again, generator = inner, self.posterior.generator
        before = generator.get_state()
        while True:
            try:
                return self._one_pass(closure, watch, counted, frozen=again)
            except PlanChangedError:  # a first pass that found parameters used in an unusual way: run it again
                again = True
                generator.set_state(before)

    def _one_pass(self, closure: Closure, watch: InputWatch, counted: Counted, *, frozen: bool) -> Any:
        model, trial = self.posterior.model, self.posterior.trial(**counted.given(), in_place=True)
        with torch.enable_grad(), frozen_statistics(model) if frozen else nullcontext(), trial:
            with watch.over(model):
                loss = closure()
            number = _number(loss)
            if loss is not None:
                check_loss(number, self.posterior)
            leaves = self.posterior._gathered.leaves or {}
            if all(w.grad is None for w in leaves.values()):
                if loss is None:
                    raise _EmptyClosureError(
                        "No gradient has arrived: the closure returned nothing, nor called backward."
                    )
                if isinstance(loss, Tensor) and loss.requires_grad:
                    loss.backward()
        self._record(number)
        return loss

    @contextmanager
    def _trial(self, counted: Counted) -> Iterator[nn.Module]:
        kept = statistics_kept_on_error(self.posterior.model)
        with (
            self._alone(),
            kept,
            self.posterior._gathered.dropped_on_error(self.posterior.process_group),
            torch.enable_grad(),
        ):
            try:
                with self.posterior.trial(**counted.given(), in_place=True) as net:
                    yield net
            except PlanChangedError as error:
                raise PlanChangedError(
                    "This pass found parameters that are used in an unusual way, and the next will know: run the block "
                    "again (nothing of it counts), or use step(closure) or gather(closure), which do so by themselves."
                ) from error
        self._record(math.nan)  # a block does not say what its loss was

    @contextmanager
    def _sampled(self) -> Iterator[nn.Module]:
        with self._alone(), self.posterior.sampled_in_place() as net:
            yield net

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside a draw, the network's parameters are the draw's: nothing else may take them for the means."""
        if self._in_use:
            raise RuntimeError(
                "Sampled weights are loaded in the network: steps and sampled_params blocks do not nest. Inside a "
                "closure the network is a draw without a block; step() comes after the block has ended."
            )
        with self.posterior.guard.exclusive(self.posterior):
            self._in_use = True
            try:
                yield
            finally:
                self._in_use = False

    def _record(self, loss: float) -> None:
        gathered = self.posterior._gathered
        gathered.add_loss(loss)
        gathered.is_silent = gathered.is_silent or math.isnan(loss)


def _number(loss: Any) -> float:
    """What a closure returned; NaN for None, which is fine if it called backward."""
    if loss is None:
        return math.nan
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return float(loss.detach())
    if isinstance(loss, int | float):
        return float(loss)
    shape = f"tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise ValueError(f"The closure returned a {shape}: it must return the batch's mean loss, one number.")


def _wanted(posterior: Any) -> int:
    """Draws of this step: one before there is a curvature, where all would be the same."""
    if not posterior.is_random or not posterior.describe().has_curvature:
        return 1
    return int(posterior.step_draws)


class VOGN(PosteriorOptimizer):
    """`credo.VOGN` as a torch optimiser.

    Args:
        model: The network.
        data_size: Number of training examples.
        options: Further arguments of `credo.VOGN`.
    """

    def __init__(self, model: nn.Module, *, data_size: int, **options: Any) -> None:
        super().__init__(methods.VOGN(model, data_size=data_size, **options))


class OGN(PosteriorOptimizer):
    """`credo.OGN` as a torch optimiser.

    Args:
        model: The network.
        data_size: Number of training examples.
        options: Further arguments of `credo.OGN`.
    """

    def __init__(self, model: nn.Module, *, data_size: int, **options: Any) -> None:
        super().__init__(methods.OGN(model, data_size=data_size, **options))


class KFAC(PosteriorOptimizer):
    """`credo.KFAC` as a torch optimiser.

    Args:
        model: The network.
        data_size: Number of training examples.
        options: Further arguments of `credo.KFAC`.
    """

    def __init__(self, model: nn.Module, *, data_size: int, **options: Any) -> None:
        super().__init__(methods.KFAC(model, data_size=data_size, **options))


class NoisyKFAC(PosteriorOptimizer):
    """`credo.NoisyKFAC` as a torch optimiser.

    Args:
        model: The network.
        data_size: Number of training examples.
        options: Further arguments of `credo.NoisyKFAC`.
    """

    def __init__(self, model: nn.Module, *, data_size: int, **options: Any) -> None:
        super().__init__(methods.NoisyKFAC(model, data_size=data_size, **options))


class IVON(PosteriorOptimizer):
    """`credo.IVON` as a torch optimiser: the same arguments, or ivon-opt's names for them.

    Args:
        model: The network.
        data_size: Number of training examples.
        ess: ivon-opt's effective sample size, data_size/temperature.
        options: Further arguments of `credo.IVON`, or of ivon-opt: `beta1` and `debias` are those of momentum,
            `hess_init` (init), `beta2` (decay), `hess_approx` (estimator: "gradsq" is "squares", there multiplied by
            `ess`, here not) and `rescale_lr` those of curvature, `clip_radius` is clip, `mc_samples` draws.
    """

    def __init__(
        self, model: nn.Module, *, data_size: int | None = None, ess: float | None = None, **options: Any
    ) -> None:
        for theirs in [name for name in _IVON_NAMES if name in options]:
            _place(options, theirs, options.pop(theirs))
        if options.pop("sync", False):
            raise ValueError(
                "sync=True: to average over processes, leave it out and call credo.distribute(optimizer.posterior) in "
                "each before the first step; every process then steps on its own part of each batch."
            )
        if options.get("clip") == math.inf:
            options["clip"] = None
        if ess is not None:
            if "temperature" in options or not 0 < ess < math.inf:
                raise ValueError(f"ess={ess} must be positive, and without temperature: it is data_size/temperature.")
            data_size = max(1, round(ess)) if data_size is None else data_size
            options["temperature"] = data_size / ess
        if data_size is None:
            raise ValueError("Give data_size, the number of training examples (or ess, ivon-opt's name for it).")
        super().__init__(methods.IVON(model, data_size=data_size, **options))


_IVON_NAMES = {
    "hess_init": "curvature.init",
    "beta1": "momentum.decay",
    "beta2": "curvature.decay",
    "clip_radius": "clip",
    "mc_samples": "draws",
    "hess_approx": "curvature.estimator",
    "rescale_lr": "curvature.rescale_lr",
    "debias": "momentum.debias",
}
_IVON_GROUPS: dict[str, type[Group]] = {"curvature": methods.IVONCurvature, "momentum": methods.IVONMomentum}


def _place(options: dict[str, Any], theirs: str, value: Any) -> None:
    """Put the value of one of ivon-opt's arguments where it belongs among ours."""
    name, _, field = _IVON_NAMES[theirs].partition(".")
    given = _IVON_GROUPS[name].given_fields(options[name]) if field and name in options else {}
    if field in given or (not field and name in options):
        raise ValueError(f"{theirs} is ivon-opt's name for {_IVON_NAMES[theirs]}: give one of them.")
    value = "squares" if theirs == "hess_approx" and value == "gradsq" else value
    options[name] = {**given, field: value} if field else value


__all__ = ["IVON", "KFAC", "OGN", "VOGN", "NoisyKFAC", "PosteriorOptimizer"]
