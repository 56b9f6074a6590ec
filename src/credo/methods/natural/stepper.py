"""Steps of natural-gradient methods: passes at draws are accumulated, and one update is made from them.

A method adds its update rule to `NaturalStepper`: `_sample` (the weights of the next pass), `_estimating` or
`_accumulate` (its curvature) and `_prepare` (the update).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.deferred import Later, Number
from credo.core.distributed.process_group import ProcessGroup
from credo.core.divergence import compare_draw
from credo.core.example_counts import EVERY, Counted, rows_checked, scalar_loss
from credo.core.kernels import flat
from credo.core.network.batchnorm import frozen_statistics, statistics_kept_on_error
from credo.core.network.inplace_inputs import same_inputs
from credo.core.network.substitute import parameters_at, substituted
from credo.core.optimizer_step import scaled_backward
from credo.core.per_example.hook_plan import PlanChangedError
from credo.core.per_example.layer_rules import widened
from credo.core.posterior import Nll, Terms
from credo.methods.adversarial_sampling import AdversarialSampling
from credo.methods.natural.groups import Warmup
from credo.methods.natural.likelihood_params import likelihood_restored_on_error, move_likelihood, ready_likelihood
from credo.methods.natural.passes import Pass, average_over_processes_
from credo.methods.natural.settings import NaturalSettings
from credo.methods.natural.validate import check_finite_loss, check_loss


class GradientAccumulator:
    """Sums over the passes since the last update: losses, gradients, and estimates of the curvature."""

    def __init__(self) -> None:
        self.leaves: Mapping[str, Tensor] | None = None  # the network's weights while a pass is open
        self.clear()

    def clear(self) -> None:
        """Drop all passes."""
        self.count = 0
        self.size = 0.0  # of all passes, in units of the first
        self.examples: float | None = None  # of the first pass, if they are counted
        self.loss: Number = 0.0
        self.is_silent = False  # the loss of a pass is not known
        self.gradients: dict[str, Tensor] = {}
        self.curvatures: dict[str, Tensor] = {}
        self.curvature_scale = 1.0
        self.flat_curvature: Tensor | None = None
        self.vectors: dict[str, Tensor] = {}  # what an update needs of the random parameters and is known already
        self._last_size = 1.0

    def relative_size(self, counted: Counted) -> float:
        """The examples of the next pass over those of the first one since the last update.

        Raises ValueError if only some of the passes of an update are given their number of examples.
        """
        if not self.count:
            return 1.0
        examples = _total(counted)
        if (examples is None) != (self.examples is None):
            raise ValueError(
                "Some of the passes that make one update were given examples= (or weights=), and others not: give it "
                "to all of them or to none, since it tells how much each of them counts."
            )
        return 1.0 if examples is None or self.examples is None else examples / self.examples

    def add(self, run: Pass) -> None:
        """Add one pass, but for its loss; its tensors are used up."""
        gradients = {name: g if g.dtype is torch.float32 else widened(g) for name, g in run.gradients.items()}
        if self.count:
            self.vectors.pop("gradients", None)
            torch._foreach_add_([*self.gradients.values()], [gradients[n] for n in self.gradients], alpha=run.size)
            if run.curvatures:
                relative = run.size * run.curvature_scale / self.curvature_scale
                new = [run.curvatures[n] for n in self.curvatures]
                torch._foreach_add_([*self.curvatures.values()], new, alpha=relative)
        else:
            self.gradients, self.curvatures, self.curvature_scale = gradients, run.curvatures, run.curvature_scale
            self.examples = _total(run.counted)
        self.count += 1
        self.size += run.size
        self._last_size = run.size

    def add_loss(self, loss: Number) -> None:
        """Add the loss of the pass that was added last."""
        self.loss = self._last_size * loss + self.loss

    def check_free(self) -> None:
        """Raise RuntimeError if the network's own weights are a draw, and not the means."""
        if self.leaves is not None:
            raise RuntimeError("Sampled weights are loaded in the network: trials, steps and draws do not nest.")

    @contextmanager
    def dropped_on_error(self, process_group: ProcessGroup | None = None) -> Iterator[None]:
        """Drop all passes if what is inside fails, and tell the process group."""
        try:
            yield
        except BaseException as error:
            self.clear()
            if process_group is not None:
                process_group.failed(error)
            raise


class NaturalStepper(NaturalSettings, ABC):
    """A posterior that accumulates gradients and curvatures of some passes and makes one update from them.

    Subclasses are update rules: they implement `_sample`, one of `_estimating` and `_accumulate`, and `_prepare`, and
    call `_set_up` when their arguments are checked.
    """

    averages_over_processes = True
    can_defer_checks = True
    checks_first_draw: ClassVar[bool] = True
    """Whether the first step with noise compares the draw's loss with that of the mean."""
    step_draws = 1
    noisy = True
    attack: AdversarialSampling | None = None
    has_curvature: bool

    # -- the update rule -----------------------------------------------------------------------------------------

    @abstractmethod
    def _sample(self) -> tuple[dict[str, Tensor], Any]:
        """Weights of the next pass by parameter name, and the noise in them if `_estimating` needs it."""

    def _estimating(self, run: Pass, net: nn.Module) -> AbstractContextManager[None]:
        """Around the forward and backward of a pass: on a clean exit, set `run.curvatures` and their scale.

        Args:
            run: The pass.
            net: The network that it runs.
        """
        return nullcontext()

    def _accumulate(self, run: Pass) -> None:
        """Add a complete pass to those of the update."""
        self._gathered.add(run)

    @abstractmethod
    def _prepare(self, found: GradientAccumulator, means: Mapping[str, nn.Parameter]) -> Callable[[], Number]:
        """Compute the update and raise all its errors; what is returned writes it, and returns the KL in nats.

        Args:
            found: Gradients and curvatures of the passes.
            means: All trainable parameters by name, the random ones first.
        """

    @property
    def temperature(self) -> float:
        """τ at the current step, which rises linearly if a `Warmup` was given."""
        given = self._temperature
        if not isinstance(given, Warmup):
            return given
        assert given.start is not None  # as its validation ensures
        reached = min(1.0, self.steps / given.steps)
        return float(given.start + (given.to - given.start) * reached)

    @property
    def variance_scale(self) -> float:
        """τ/N: the variance is this over curvature, prior and damping."""
        return self.temperature / self.data_size

    def _penalty(self, kl: Number) -> Number:
        """The KL's part of the mean loss, τ/N·KL."""
        return kl * self.variance_scale

    @property
    def is_noisy(self) -> bool:
        """Whether draws differ from the mean."""
        return self.has_curvature and self.noisy

    @property
    def uncertainty_needs(self) -> str:
        """A step, before which there is no curvature; points need nothing."""
        return (
            "a training step: credo.fit(posterior, loader, epochs=…)" if self.noisy and not self.has_curvature else ""
        )

    def _set_up(self, *args: Any, **options: Any) -> torch.device:
        self._gathered = GradientAccumulator()
        return super()._set_up(*args, **options)

    # -- training ------------------------------------------------------------------------------------------------

    def step(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> Terms:
        """Gather `draws` passes and update. Before there is a curvature, all would be the same pass at the mean.

        Args:
            nll: `nll(net)` gives the batch's mean negative log-likelihood.
            examples: The number that the mean was divided by, as in `Posterior.step`.
            weights: How often each row counts, as in `Posterior.step`.
        """
        with self._prepared(nll, _counted(examples, weights)) as update:
            return update()

    @contextmanager
    def prepared(
        self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None
    ) -> Iterator[Callable[[], Terms]]:
        """Gather and check the passes of a step; what it yields makes the update.

        Args:
            nll: `nll(net)` gives the batch's mean negative log-likelihood.
            examples: The number that the mean was divided by, as in `step`.
            weights: How often each row counts, as in `step`.
        """
        with self._prepared(nll, _counted(examples, weights)) as update:
            yield update

    @contextmanager
    def _prepared(self, nll: Nll, counted: Counted) -> Iterator[Callable[[], Terms]]:
        found = self._gathered
        restored = statistics_kept_on_error(self.model) if self._has_statistics else nullcontext()
        with restored, found.dropped_on_error(self.process_group):
            compares = self.checks_first_draw and not self._watch.compared and self.is_noisy
            compares = compares and self.process_group is None and self.attack is None
            if compares or self.step_draws > 1 or self.attack is not None:
                nll = same_inputs(nll)
            for _ in range(self.step_draws if self.has_curvature else 1):
                self._gather(nll, counted)
            if compares:
                compare_draw(self, found.loss / found.size, nll)
            yield self._ready()

    def gather(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> float:
        """One pass on a new draw whose gradients the next `update` averages in; returns its NLL.

        Several calls on parts of a batch are gradient accumulation; parts of different size count right if all are
        given `examples` (see `step`).

        Args:
            nll: `nll(net)` gives the mean negative log-likelihood of the part.
            examples: The number that the mean was divided by, as in `step`.
            weights: How often each row counts, as in `step`.
        """
        return float(self._gather(nll, _counted(examples, weights)))

    def _gather(self, nll: Nll, counted: Counted) -> Number:
        self._begin_draw(counted)
        if self.attack is not None and self.is_noisy:
            run = self._adversarial_pass(nll, counted)
        else:  # further draws of a step leave running statistics alone
            frozen = self._gathered.count > 0 and self.step_draws > 1
            run = self._run(nll, *self._sample(), counted, frozen=frozen)
        self._accumulate(run)
        self._gathered.add_loss(run.loss)
        return run.loss

    @contextmanager
    def trial(
        self, *, examples: float | None = None, weights: Tensor | None = None, in_place: bool = False
    ) -> Iterator[nn.Module]:
        """The network as a new draw, for a forward and backward pass of your own; gathered on a clean exit.

        Args:
            examples: What the loss of this pass is a mean over, as in `step`.
            weights: How often each row counts, as in `step`.
            in_place: Put the draw into the network itself, for code that calls it by its own name. No other thread may
                use the network meanwhile.
        """
        counted = _counted(examples, weights)
        self._begin_draw(counted)
        with self._pass(*self._sample(), counted, in_place) as (net, run):
            yield net
        self._accumulate(run)

    def _begin_draw(self, counted: Counted) -> None:
        """All checks of a pass come before the generator moves."""
        self._gathered.check_free()
        self._gathered.relative_size(counted)
        if self.process_group is not None:
            self.process_group.begin_pass(self, self._gathered.count, self.step_draws)

    def _adversarial_pass(self, nll: Nll, counted: Counted) -> Pass:
        """The passes of one draw under `attack`, as one; for methods that accept an attack."""
        raise NotImplementedError(f"{type(self).__name__} has an attack, but does not implement `_adversarial_pass`.")

    def _run(
        self,
        nll: Nll,
        weights: dict[str, Tensor],
        noise: Any,
        counted: Counted,
        *,
        frozen: bool,
        first: bool = True,
    ) -> Pass:
        """One pass of the loss at these weights; once more if it has changed the plan of its hooks."""
        while True:
            try:
                statistics = frozen_statistics(self._net) if frozen else nullcontext()
                with statistics, self._pass(weights, noise, counted, first=first) as (net, run):
                    value = nll(net)
                    if not (isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad):
                        value = scalar_loss(value)
                    if self._checks.is_open:
                        run.loss = Later(value.detach())
                    else:
                        run.loss = loss = value.item()
                        if self.process_group is not None or not math.isfinite(loss):
                            check_loss(loss, self)
                    if self.loss_scale == 1 or not self.can_scale_loss:
                        value.backward(flat.one(value.device, value.dtype))
                    else:
                        scaled_backward(value, self.loss_scale, [*run.weights.values()])
                return run
            except PlanChangedError as error:
                # The pass just thrown away has counted as data for running statistics already.
                frozen, nll = True, same_inputs(nll, error.changed)

    @contextmanager
    def _pass(
        self, weights: dict[str, Tensor], noise: Any, counted: Counted, in_place: bool = False, *, first: bool = True
    ) -> Iterator[tuple[nn.Module, Pass]]:
        found = self._gathered
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        run = Pass(leaves, noise, counted, found.relative_size(counted))
        restored: AbstractContextManager[None] = nullcontext()
        if self.likelihood_step is not None:
            restored = likelihood_restored_on_error(
                self.likelihood_step, first=first and not found.count, size=run.size
            )
        net, held = (self.model, self.guard.holding()) if in_place else (self._net, nullcontext())
        drawn = substituted(net, leaves, self._aliases, original=self.model)
        checked = nullcontext() if counted.weights is None else rows_checked(net, counted)
        found.leaves = leaves
        try:
            with restored, drawn, held, checked, self._estimating(run, net):
                yield net, run
                run.gradients = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()}
                if all(leaf.grad is None for leaf in leaves.values()):
                    self.guard.check_used(in_place)
                    raise RuntimeError(
                        "No gradient has arrived: the loss does not depend on the network, or no backward."
                    )
        finally:
            found.leaves = None

    def update(self) -> Terms:
        """One update from what was gathered since the last; `nll` is the mean over the passes."""
        return self._ready()()

    @torch.no_grad()
    def _ready(self) -> Callable[[], Terms]:
        """All of an update that may fail; what it returns changes the parameters."""
        found = self._gathered
        if not found.count:
            raise RuntimeError("Nothing was gathered: call gather(nll), or step(nll), which does both.")
        if self.process_group is not None and self.process_group.defers:
            own = {} if self.likelihood_step is None else self.likelihood_step.parameters
            check = partial(check_finite_loss, posterior=self)
            average_over_processes_(found, self.process_group, own.values(), check)
        with found.dropped_on_error():
            before = self._half_squares()
            write = self._prepare(found, parameters_at(self.model, self.vector.names))
            if self.likelihood_step is not None:
                ready_likelihood(self.likelihood_step, found.size, at=self.steps)
        return partial(self._finish, write, before)

    def _half_squares(self) -> Number | None:
        """½·Σ ((mean − prior mean)/prior std)² before the update, for point estimates, which have no KL."""
        return None

    @torch.no_grad()
    def _finish(self, write: Callable[[], Number], half_squares: Number | None) -> Terms:
        found = self._gathered
        kl = write()
        if self.likelihood_step is not None and not self.likelihood.update_(self.steps):
            move_likelihood(self.likelihood_step, scale=self.lr_scale)
        self._last_scale = self.lr_scale
        nll, penalty = found.loss / found.size, self._penalty(kl if half_squares is None else half_squares)
        found.clear()
        terms = {"loss": nll + penalty, "nll": nll, "penalty": penalty, "kl": kl if half_squares is None else None}
        return self._stepped(Terms(**terms))  # type: ignore[arg-type]

    def _momentum_change(self) -> float | Tensor:
        """The factor of the momentum that keeps its part of the step as long when the learning rate changes."""
        last, scale = self._last_scale, self.lr_scale
        if not self.momentum_correction or last is None:
            return 1.0
        if isinstance(last, Tensor):
            return torch.where(last > 0, scale / last, 1.0)
        return 1.0 if last in (0.0, scale) else scale / last


def _counted(examples: float | None, weights: Tensor | None) -> Counted:
    return EVERY if examples is None and weights is None else Counted(examples, weights)


def _total(counted: Counted) -> float | None:
    return None if counted is EVERY else counted.total
