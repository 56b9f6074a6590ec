"""VOGN: variational inference by natural gradients, with squared per-example gradients as curvature.

q(w) = N(μ, σ²), σ² = τ/(N(s + δ̃ + γ)), δ̃ = τδ/N; N counts the data (times an augmentation factor), δ is the prior's
precision, τ the temperature, γ the damping. Each step, with per-example gradients gᵢ at draws w ~ q,

    m ← β₁m + mean gᵢ + δ̃(μ − μ₀),    s ← βs + (1 − β)·mean gᵢ²,    μ ← μ − lr·m/(s + δ̃ + γ)

(Khan et al. 2018; Osawa et al. 2019, in the convention of their code, which is exact also for τ ≠ 1).
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.example_counts import Counted
from credo.core.kernels import flat
from credo.core.likelihood import Likelihood
from credo.core.network.selection import Random
from credo.core.per_example.hooks import squared_gradients
from credo.core.per_example.plan import PerExamplePlan
from credo.core.posterior import Nll
from credo.core.prior import Prior, Value
from credo.methods.adversarial_sampling import AdversarialSampling
from credo.methods.natural.adversarial_pass import attack_of, mixed_pass
from credo.methods.natural.diagonal import Coefficients, DiagonalStepper, NaturalGaussian
from credo.methods.natural.stepper import GradientAccumulator, Pass
from credo.methods.natural.validate import check_augmentation, check_numbers, check_warmup


class GaussNewton(DiagonalStepper, ABC):
    """The update rule of VOGN and of OGN, which has no noise."""

    nonnegative = ("curvature",)
    plan: PerExamplePlan
    momentum_decay: float
    averaged: bool
    curvature_decay: float
    damping: float

    # -- q(w) = N(μ, σ²), σ² = τ/(N(s + δ̃ + γ)) ----------------------------------------------------------------

    def _std(self) -> Tensor:
        """σ; zero before the first step, which finds the curvature."""
        s = self.curvature[: self.layout.size]
        if not self.has_curvature:
            return torch.zeros_like(s)
        scale = self.variance_scale
        return (scale / (s + (self._prior_shift(scale) + self.damping))).sqrt()

    def _prior_shift(self, scale: float) -> float | Tensor:
        """δ̃ = τδ/N."""
        return scale * (self._prior_numbers or self._read_prior())[1]

    def _draw_vector(self, means: Mapping[str, Tensor]) -> tuple[Tensor, None]:
        """μ + σε."""
        scale = self.variance_scale
        compiled = self._compiled_draw(means, scale, self._prior_shift(scale) + self.damping)
        if compiled is not None:
            return compiled[0], None
        return flat.gaussian(self.layout.flatten(means).detach(), self._std(), self.generator), None

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

    def _prepare(self, found: GradientAccumulator, means: Mapping[str, nn.Parameter]) -> Callable[[], float]:
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
        lr: Learning rate, or rates by parameter name globs.
        prior_precision: Precision δ of the Gaussian prior about zero, also by parameter name globs.
        prior: The Gaussian prior instead: an object, its standard deviation or its description. Default: N(0, 1).
        momentum: Weight β₁ of the old momentum.
        averaged: Make the momentum an average (with debiasing) instead of a sum.
        curvature_decay: Weight β of the *old* curvature, as in Adam (the paper's β₂ is one minus it: its CIFAR runs
            have 0.001 here, its ImageNet run 0.1).
        curvature_init: The first curvature s. None: the first step is taken at the mean and finds it.
        damping: γ, added to the curvature; part of the noise's precision, too.
        draws: Draws a step, whose gradients are averaged.
        noise: `"weights"`, or an `AdversarialSampling`, which mixes the gradients at a draw with those at the worst
            weights near another (an experiment).
        temperature: τ; below 1 the posterior is narrower, 1 is the exact one.
        temperature_start: τ at the first step, from where it rises linearly.
        warmup_steps: Steps until `temperature` is reached.
        augmentation: Factor of N that data augmentation is worth.
        momentum_correction: Rescale the momentum when the learning rate changes.
        paper_tau: Removed; raises ValueError if True.
        random: Which parameters are random: `"all"` but the affine ones of normalisation layers, `"weights"`, `"last"`,
            name globs, or a predicate of name and parameter.
        likelihood: How outputs are distributed, `"categorical"` by default.
        seed: Start of the random numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        lr: float | Mapping[str, float] = 1e-2,
        prior_precision: Value | None = None,
        prior: Prior | Mapping[str, Any] | float | None = None,
        momentum: float = 0.9,
        averaged: bool = False,
        curvature_decay: float = 0.999,
        curvature_init: float | None = None,
        damping: float = 0.1,
        draws: int = 1,
        noise: AdversarialSampling | Mapping[str, Any] | str = "weights",
        temperature: float = 1.0,
        temperature_start: float | None = None,
        warmup_steps: int = 0,
        augmentation: float = 1.0,
        momentum_correction: bool = True,
        paper_tau: bool = False,
        random: Random = "all",
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        check_numbers(momentum=momentum, decay=curvature_decay, damping=damping, draws=draws, temperature=temperature)
        check_augmentation(augmentation)
        if curvature_init is not None and not 0 <= curvature_init < math.inf:
            raise ValueError(f"curvature_init={curvature_init} must not be negative.")
        check_warmup(temperature_start, warmup_steps)
        if paper_tau:
            raise ValueError("paper_tau=True was removed: it made the noise of the paper's text, not of its code.")
        self.attack = attack_of(noise)
        self.arguments["noise"] = self.attack or "weights"
        self.momentum_decay, self.averaged, self.curvature_decay = momentum, averaged, curvature_decay
        self.damping, self.step_draws, self.effective_size = damping, int(draws), data_size * augmentation
        self.final_temperature, self.momentum_correction = temperature, momentum_correction
        self.temperature_start, self.warmup_steps = temperature_start, int(warmup_steps)
        # Step count and curvature are in saved files, too: else there would be no noise, nor the right temperature.
        self._make_state(lr, prior, prior_precision, random, curvature_init or 0.0, progress=(2,))
        self.has_curvature = curvature_init is not None
        self.plan = PerExamplePlan(self._net, self.vector.names, self._aliases)

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
