"""VOGN: variational inference by natural gradients, with squared per-example gradients as curvature.

q(w) = N(μ, σ²), σ² = τ/(N(s + δ̃ + γ)), δ̃ = τδ/N; N counts the data, δ is the prior's precision, τ the temperature, γ
the damping. Each step, with per-example gradients gᵢ at draws w ~ q,

    m ← β₁m + mean gᵢ + δ̃(μ − μ₀),    s ← βs + (1 − β)·mean gᵢ²,    μ ← μ − lr·m/(s + δ̃ + γ)

(Khan et al. 2018; Osawa et al. 2019, in the convention of their code, which is exact also for τ ≠ 1). All depends on
τ/N alone: their factor k of N for data augmentation is a temperature of τ/k. Where curvatures are far below γ, this is
SGD, whose best rate differs from task to task. With `update="adam"` the means take Adam's step along m instead,
μ ← μ − lr·m/√v with v ← β₂v + (1 − β₂)(mean gᵢ + δ̃(μ − μ₀))², as in Vadam (Khan et al. 2018); the noise is the same.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.arguments import Renamed
from credo.core.deferred import Number
from credo.core.errors import unknown
from credo.core.example_counts import Counted
from credo.core.likelihood import Likelihood
from credo.core.network.selection import Random
from credo.core.optimizers import Rates
from credo.core.per_example.hooks import squared_gradients
from credo.core.per_example.plan import PerExamplePlan
from credo.core.posterior import Nll
from credo.core.prior import Prior, Value
from credo.core.support.validate import checked_count
from credo.methods.adversarial_sampling import AdversarialSampling
from credo.methods.natural.adversarial_pass import attack_of, mixed_pass
from credo.methods.natural.diagonal import Coefficients, DiagonalStepper
from credo.methods.natural.groups import (
    PAPER_TAU,
    RENAMED_CURVATURE,
    RENAMED_MOMENTUM,
    RENAMED_TEMPERATURE,
    Curvature,
    Momentum,
    Warmup,
)
from credo.methods.natural.mean_field import NaturalGaussian
from credo.methods.natural.passes import Pass
from credo.methods.natural.stepper import GradientAccumulator
from credo.methods.natural.validate import check_damping
from credo.methods.planning import COLDER, FEWEST_EPOCHS, RISING_PART, USUAL_PART, WARM, planned_temperature

SQUARE_DECAY = 0.999


def _rising(to: float, steps: int, part: float) -> dict[str, float]:
    """The temperature of a training: at first the curvature is small and the noise that of the prior and the damping.

    Networks that are trained already, and short trainings, would be lost in it.

    Args:
        to: The temperature in the end.
        steps: Steps of the training.
        part: Part of the steps in which it rises.
    """
    return {"start": to / 100, "steps": max(1, int(part * steps)), "to": to}


class GaussNewton(DiagonalStepper, ABC):
    """The update rule of VOGN and of OGN, which has no noise."""

    nonnegative = ("curvature", "squares")
    can_scale_loss = can_compile = False
    plan: PerExamplePlan
    curvature_decay: float
    curvature_init: float | None
    damping: float

    def _set_groups(
        self,
        momentum: Momentum | Mapping[str, Any] | float,
        curvature: Curvature | Mapping[str, Any] | float,
        damping: float,
        temperature: Warmup | Mapping[str, Any] | float | None,
        adam: bool = False,
    ) -> None:
        """Validate and keep the numbers of the update rule."""
        check_damping(damping)
        self.damping = damping
        self._set_momentum(Momentum.of(momentum))
        self.averaged = self.averaged or adam
        self.steps_as_adam = adam
        self._set_temperature(temperature)
        found = Curvature.of(curvature)
        self.arguments["curvature"] = found
        self.curvature_decay = 0.999 if found.decay is None else found.decay
        self.curvature_init = found.init

    def _make_state(
        self,
        lr: Rates,
        prior: Prior | Mapping[str, Any] | float | None,
        prior_precision: Value | None,
        random: Random,
    ) -> None:
        """Make momentum, curvature and the plan of per-example gradients."""
        # Step count and curvature are in saved files, too: else there would be no noise, nor the right temperature.
        self._make_vectors(lr, prior, prior_precision, random, self.curvature_init or 0.0, progress=(2,))
        if self.steps_as_adam:
            self.squares = torch.zeros_like(self.momentum)
        self.has_curvature = self.curvature_init is not None
        self.plan = PerExamplePlan(self._net, self.vector.names, self._aliases)

    # -- q(w) = N(μ, σ²), σ² = τ/(N(s + δ̃ + γ)) ----------------------------------------------------------------

    def _std(self) -> Tensor:
        """σ; zero before the first step, which finds the curvature."""
        s = self.curvature[: self.layout.size]
        if not self.has_curvature:
            return torch.zeros_like(s)
        return (self.variance_scale / (s + (self._prior_shift() + self.damping))).sqrt()

    def _prior_shift(self) -> float | Tensor:
        """δ̃ = τδ/N."""
        return (self._prior_numbers or self._read_prior())[1] * self.variance_scale

    def _draw_vector(self, means: Mapping[str, Tensor]) -> tuple[Tensor, None]:
        """μ + σε."""
        shift = self._prior_shift() + self.damping
        return self._draw_at(means, self.variance_scale, shift)[0], None

    # -- the curvature of a pass: mean gᵢ² ---------------------------------------------------------------------

    @contextmanager
    def _estimating(self, run: Pass, net: nn.Module) -> Iterator[None]:
        if self.plan.model is not net:
            self.plan = self.plan.on(net)
        with squared_gradients(self.plan, run.counted) as sums:
            yield
            run.curvatures = sums.result()
        run.examples = sums.examples or 1.0
        run.curvature_scale = 1 / run.examples

    # -- the update --------------------------------------------------------------------------------------------

    def _prepare(self, found: GradientAccumulator, means: Mapping[str, nn.Parameter]) -> Callable[[], Number]:
        """m ← β₁m + g + δ̃(μ − μ₀), s ← βs + (1 − β)·h, μ ← μ − lr·m/(s + δ̃ + γ); the first s is h."""
        beta, scale = self.momentum_decay, self.variance_scale
        mean, precision = self._prior_numbers or self._read_prior()
        keeps = self._halves(beta * (1.0 if self.averaged else self._momentum_change()))
        rates = self._halves(self.rates)
        random = Coefficients(
            lr=rates[0] * self.lr_scale,
            keep=keeps[0],
            take=1 - beta if self.averaged else 1.0,
            debias=1 / (1 - beta ** (self.steps + 1)) if self.averaged else 1.0,
            decay=self.curvature_decay if self.has_curvature else 0.0,
            renew=1 - self.curvature_decay if self.has_curvature else 1.0,
            shift=scale * precision,
            damping=self.damping,
            prior_mean=mean,
            prior_precision=precision,
            gradient_scale=1 / found.size,
            curvature_scale=found.curvature_scale / found.size,
            variance=scale if self.noisy else 0.0,
            square_decay=SQUARE_DECAY,
            square_debias=1 / (1 - SQUARE_DECAY ** (self.steps + 1)),
        )
        rest = replace(random, lr=rates[1] * self.lr_scale, keep=keeps[1], **_NO_PRIOR)
        return self._diagonal_update(means, found.gradients, found.curvatures, random, rest)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which have no private copy of the network yet."""
        return {**self.__dict__, "plan": self.plan.on(self.model)}


_NO_PRIOR: dict[str, Any] = {"shift": 0.0, "prior_mean": 0.0, "prior_precision": 0.0, "variance": 0.0}


class VOGN(GaussNewton, NaturalGaussian):
    """Mean-field Gaussian posterior by natural gradients; a step costs about as much as one of Adam.

    Parameters that are not random have neither noise nor prior, only the preconditioner: keep `damping` above zero with
    them. BatchNorm couples examples; per-example gradients ignore this, as is usual.

    Args:
        model: The network; its parameters become the posterior mean.
        data_size: The number of training examples N.
        lr: Learning rate, or rates by parameter name globs. None: 1e-2 for `"natural"`, 1.5e-2 for `"adam"`.
        prior: The Gaussian prior: an object, its standard deviation or its description; None: N(0, 1), or
            what `fit` chooses.
        prior_precision: Precision δ of a Gaussian prior about zero instead, also by parameter name globs.
        momentum: Weight β₁ of the old momentum, a `Momentum`, or a mapping of its fields.
        curvature: Weight β of the old curvature, a `Curvature`, or a mapping of its fields.
        damping: γ, added to the curvature; part of the noise's precision, too.
        update: How the means move: `"natural"` is the papers' step; `"adam"` is one by root mean squared gradients, for
            networks whose curvatures are far below the damping.
        draws: Draws a step, whose gradients are averaged.
        noise: `"weights"`, or an `AdversarialSampling`, which mixes the gradients at a draw with those at the worst
            weights near another (an experiment).
        temperature: τ; below 1 the posterior is narrower, 1 is the exact one. None: `fit` chooses it for the task and
            the number of epochs, by two short trainings if these are many; 1 in a loop of your own. A `Warmup`, or a
            mapping of its fields, rises linearly. Data augmentation that is worth k times the data: `temperature=1/k`.
        random: Which parameters are random: `"all"` but the affine ones of normalisation layers, `"weights"`, `"last"`,
            name globs, or a predicate of name and parameter.
        likelihood: How outputs are distributed, `"categorical"` by default.
        seed: Start of the random numbers.
    """

    tunable: ClassVar[Mapping[str, tuple[float, float]]] = {"lr": (1e-3, 3e-2), "temperature": (0.02, 1.0)}
    rates_by_update: ClassVar[Mapping[str, float]] = {"natural": 1e-2, "adam": 1.5e-2}
    tries_plans = True
    _renamed_arguments: ClassVar[Renamed] = {
        **RENAMED_MOMENTUM,
        **RENAMED_CURVATURE,
        **RENAMED_TEMPERATURE,
        "paper_tau": PAPER_TAU,
    }

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        lr: Rates | None = None,
        prior: Prior | Mapping[str, Any] | float | None = None,
        prior_precision: Value | None = None,
        momentum: Momentum | Mapping[str, Any] | float = Momentum(),
        curvature: Curvature | Mapping[str, Any] | float = Curvature(),
        damping: float = 0.1,
        update: str = "natural",
        draws: int = 1,
        noise: AdversarialSampling | Mapping[str, Any] | str = "weights",
        temperature: Warmup | Mapping[str, Any] | float | None = None,
        random: Random = "all",
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        if update not in self.rates_by_update:
            raise ValueError(unknown("update", str(update), self.rates_by_update))
        self._set_groups(momentum, curvature, damping, temperature, adam=update == "adam")
        self.step_draws = checked_count("draws", draws, what="draws a step")
        self.attack = attack_of(noise)
        self.arguments["noise"] = self.attack or "weights"
        self.arguments["lr"] = self.rates_by_update[update] if lr is None else lr
        self._make_state(self.arguments["lr"], prior, prior_precision, random)

    @property
    def default_lr(self) -> float:
        """The learning rate where none is given."""
        return self.rates_by_update[self.arguments["update"]]

    def _planned_temperature(self, steps: int, epochs: float) -> Any:
        part = RISING_PART if self.steps_as_adam and epochs < FEWEST_EPOCHS else USUAL_PART
        return _rising(planned_temperature(self.likelihood.task, epochs), steps, part)

    def plan_as_(self, plan: str, *, steps: int, epochs: float, is_short: bool = False) -> None:
        """Cold: a fifth of the usual temperature in a short training, and the usual one. Warm: 1, and the usual one.

        Args:
            plan: `"cold"` or `"warm"`.
            steps: Steps of the training.
            epochs: Times that every example is seen, in the whole training.
            is_short: Whether the training is a short one, to compare the plans.
        """
        to, part = planned_temperature(self.likelihood.task, epochs), USUAL_PART
        if plan == "cold" and (is_short or self.steps_as_adam):
            part = RISING_PART
        if plan == "cold" and is_short:
            to *= 2 * COLDER
            self._plan_prior(1.0)
        elif plan == "warm" and not is_short:
            to = max(WARM, to)
        self._set_planned("temperature", _rising(to, steps, part))
        self.plan_training_(steps=steps, epochs=epochs)

    def _adversarial_pass(self, nll: Nll, counted: Counted) -> Pass:
        assert self.attack is not None
        return mixed_pass(self, self.attack, nll, counted)

    @contextmanager
    def trial(
        self, *, examples: float | None = None, weights: Tensor | None = None, in_place: bool = False
    ) -> Iterator[nn.Module]:
        """As of `NaturalStepper`; raises RuntimeError with adversarial noise.

        Args:
            examples: What the loss of this pass is a mean over, as in `step`.
            weights: How often each row counts, as in `step`.
            in_place: Put the draw into the network itself, for code that calls it by its own name.
        """
        if self.attack is not None and self.attack.weight > 0:
            raise RuntimeError("AdversarialSampling runs the loss itself, several times: use step(nll) or gather(nll).")
        with super().trial(examples=examples, weights=weights, in_place=in_place) as net:
            yield net
