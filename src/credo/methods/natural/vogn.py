"""VOGN: variational inference by natural gradients, with the squared gradients of single examples as curvature.

q(w) = N(μ, σ²), σ² = τ/(N(s + δ̃ + γ)), δ̃ = τδ/N; N counts the data (times an augmentation factor), δ is the prior's
precision, τ the temperature, γ the damping. Each step, with per-example gradients gᵢ at draws w ~ q,

    m ← β₁m + mean gᵢ + δ̃(μ − μ₀),    s ← βs + (1 − β)·mean gᵢ²,    μ ← μ − lr·m/(s + δ̃ + γ)

(Khan et al. 2018; Osawa et al. 2019, in the convention of their code, which is exact also for τ ≠ 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.example_counts import Counted
from credo.core.kernels import flat
from credo.core.likelihood import Likelihood
from credo.core.network.batchnorm import frozen_statistics
from credo.core.network.selection import Random
from credo.core.network.substitute import parameters_at
from credo.core.optimizer_step import scalar_loss
from credo.core.per_example.api import batch_gradients as gradients_and_squares
from credo.core.per_example.hooks import squared_gradients as square_sums
from credo.core.per_example.plan import PerExamplePlan as SquarePlan
from credo.core.posterior import Nll, Terms
from credo.core.prior import Prior, Value
from credo.methods.adversarial_sampling import NAME as ADVERSARIAL
from credo.methods.adversarial_sampling import AdversarialSampling, is_attack, make_attack, unknown_noise, weight_slopes
from credo.methods.natural.accumulator import Gathered
from credo.methods.natural.base import NaturalGaussian
from credo.methods.natural.likelihood_params import likelihood_gradients, likelihood_kept_on_error, put_back_
from credo.methods.natural.param_vector import halves, last_scale, momentum_change, precision_of
from credo.methods.natural.update import Update
from credo.methods.natural.validate import check_augmentation, check_loss, check_numbers, check_paper_tau, check_warmup


class VOGN(NaturalGaussian):
    """Mean-field Gaussian posterior by natural gradients; a step costs about as much as one of Adam.

    `prior_precision` (or `prior`, a Gaussian) and `lr` may be given by parameter name globs. `curvature_decay` is the
    weight of the *old* curvature, as in Adam (the paper's β₂ is one minus it: its CIFAR runs have 0.001 here, its
    ImageNet run 0.1). Without `curvature_init` the first step is taken at the mean. `averaged` makes the momentum
    an average (with debiasing) instead of a sum. The temperature rises linearly from `temperature_start` over
    `warmup_steps`. Parameters that are not random, affine ones of normalisation layers by default, have neither noise
    nor prior, only the preconditioner: keep `damping` above zero with them. BatchNorm couples examples; their
    squared gradients ignore this, as is usual. `noise=AdversarialSampling(...)` mixes gradients and squares at a draw
    with those at the worst weights near another; so far an experiment.
    """

    nonnegative = ("curvature",)

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
            check_paper_tau(max(temperature, temperature_start or temperature), curvature_decay)
        self.attack = _attack_of(noise)
        self._config = {
            "lr": dict(lr) if isinstance(lr, Mapping) else lr,
            "momentum": momentum,
            "averaged": averaged,
            "curvature_decay": curvature_decay,
            "curvature_init": curvature_init,
            "damping": damping,
            "draws": int(draws),
            "noise": "weights" if self.attack is None else self.attack.config(),
            "temperature": temperature,
            "temperature_start": temperature_start,
            "warmup_steps": int(warmup_steps),
            "augmentation": augmentation,
            "momentum_correction": momentum_correction,
            "paper_tau": paper_tau,
        }
        self.momentum_decay, self.averaged, self.curvature_decay = momentum, averaged, curvature_decay
        self.damping, self.step_draws, self.effective_size = damping, int(draws), data_size * augmentation
        self.final_temperature, self.momentum_correction, self.paper_tau = temperature, momentum_correction, paper_tau
        # Step count and curvature are in saved files, too: else there would be no noise, nor the right temperature.
        self._make_state(lr, prior, prior_precision, random, curvature_init or 0.0, progress=(2,))
        self.has_curvature = curvature_init is not None
        self.plan = SquarePlan(self._net, self.split.layout.names, self._aliases)
        self.noisy = True

    @property
    def temperature(self) -> float:
        """τ at the current step."""
        start, steps = self._config["temperature_start"], self._config["warmup_steps"]
        if not steps:
            return self.final_temperature
        reached = min(1.0, self.steps / steps)
        return float(start + (self.final_temperature - start) * reached)

    @property
    def is_noisy(self) -> bool:
        """Whether draws differ from the mean."""
        return self.has_curvature and self.noisy

    # -- the distribution ------------------------------------------------------------------------------------

    @property
    def variance_scale(self) -> float:
        """τ/N."""
        return (1.0 if self.paper_tau else self.temperature) / self.effective_size

    def _variance(self) -> tuple[float, float | Tensor]:
        """σ² is the first over s + the second."""
        return self.variance_scale, self._shift() + self.damping

    def _shift(self) -> float | Tensor:
        return self.temperature / self.effective_size * precision_of(self.prior)

    def _std(self) -> Tensor:
        """√(τ/(N(s + δ̃ + γ))); zero before the first step, which finds the curvature."""
        s = self.curvature[: self.layout.size]
        if not self.has_curvature:
            return torch.zeros_like(s)
        scale, shift = self._variance()
        return (scale / (s + shift)).sqrt()

    def _flat_draw(self) -> Tensor:
        means = parameters_at(self.model, self.layout.names)
        s = self.curvature[: self.layout.size]
        scale, shift = self._variance()
        if not self.is_noisy:
            return self.layout.flatten(means).detach()
        if isinstance(shift, float) and flat.fused([*means.values()], s):
            listed = flat.TensorList(self.layout.pieces(means))
            return flat.precision_draw(listed, s, flat.new_key(self.generator), scale=scale, shift=shift)
        return flat.gaussian(self.layout.flatten(means).detach(), self._std(), self.generator)

    # -- training --------------------------------------------------------------------------------------------

    def gather(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> float:
        """One pass on a new draw whose gradients the next `update` averages in; returns its NLL.

        Several calls on parts of a batch are gradient accumulation; parts of different size count right if all are
        given `examples` (see `step`).
        """
        counted = Counted(examples, weights)
        self._gathered.check_free()
        kept = likelihood_kept_on_error(
            self.descent, first=not self._gathered.count, share=self._gathered.share(counted)
        )
        self._begin_pass(self._gathered.count, self.step_draws)
        attack = self.attack if self.is_noisy else None
        share = 1.0 if attack is None else 1 - attack.weight
        every = attack is not None and attack.weight > 0 and attack.attack_statistics
        inner = bool(self._gathered.count) and self.step_draws > 1 and not every
        found: _Pass | None = None
        with kept:
            if share > 0:
                found = self._pass(nll, self._weights(), share, counted, frozen=inner)
            if attack is not None and share < 1:
                frozen = inner or (share > 0 and not every)
                worst = self._pass(
                    nll, self._worst_weights(nll, attack, counted), attack.weight, counted, frozen=frozen
                )
                found = worst if found is None else found.plus_(worst)
        assert found is not None
        self._gathered.add(found.loss, found.gradients, found.squares, found.weight, counted)
        return found.loss

    def _pass(self, nll: Nll, weights: dict[str, Tensor], share: float, counted: Counted, *, frozen: bool) -> _Pass:
        """`share` of the loss and of what is gathered at these weights."""
        part = nll if share == 1 else lambda net: share * scalar_loss(nll(net))
        self.plan = self.plan.on(self._net)
        with frozen_statistics(self._net) if frozen else nullcontext(), self._means_unread(weights):
            found = gradients_and_squares(self.plan, weights, self._checked(part), counted)
        # A loss times the share has squares times its square.
        return _Pass(found.loss, found.gradients, found.squares, 1 / ((found.examples or 1.0) * share))

    def _worst_weights(self, nll: Nll, attack: AdversarialSampling, counted: Counted) -> dict[str, Tensor]:
        total = counted.total
        if total is not None:  # slopes are averaged over processes, and only their signs matter
            nll = partial(_times, nll, total)
        random = parameters_at(self.model, self.layout.names)
        with torch.no_grad():
            mean, std = self.layout.flatten(random).detach(), self._std()
        eps = flat.normal(self.layout.size, self.generator, device=std.device, dtype=std.dtype)
        check = partial(check_loss, posterior=self)
        frozen = not attack.attack_statistics
        slopes = weight_slopes(
            self._net, nll, self.layout, self._aliases, check, frozen=frozen, process_group=self.process_group
        )
        worst = torch.addcmul(mean, std, attack.worst_noise(eps, mean, std, slopes, self.layout))
        own = {name: p.detach() for name, p in parameters_at(self.model, self.split.rest).items()}
        return {**self.layout.split(worst), **own}

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
        if self.attack is not None and self.attack.weight > 0:
            raise RuntimeError("AdversarialSampling runs the loss itself, several times: use step(nll) or gather(nll).")
        counted = Counted(examples, weights)
        self._gathered.check_free()
        share = self._gathered.share(counted)
        self._begin_pass(self._gathered.count, self.step_draws)
        leaves = {name: w.detach().requires_grad_() for name, w in self._weights().items()}
        self.plan = self.plan.on(self.model if in_place else self._net)
        kept = likelihood_kept_on_error(self.descent, first=not self._gathered.count, share=share)
        drawn = self._with_draw(leaves, in_place)
        with kept, self._gathered.trying(leaves), drawn as net, square_sums(self.plan, counted) as sums:
            yield net
            squares = sums.result()
        gradients = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()}
        self._gathered.add(0.0, gradients, squares, 1 / (sums.examples or 1.0), counted)

    def _move(self, *update: Any) -> Terms:
        terms = super()._move(*update)
        self._last_scale = self.lr_scale
        return terms

    def _curvatures(self, found: Gathered) -> Mapping[str, Tensor]:
        return found.curvatures

    def _penalty(self, kl: float) -> float:
        return self.temperature / self.effective_size * kl

    def _updates(self, found: Gathered) -> tuple[Update, Update]:
        change = momentum_change(self.lr_scale, self._last_scale) if self.momentum_correction else 1.0
        keeps = halves(self.momentum_decay * (1.0 if self.averaged else change), self.layout.size)
        new = 1 - self.curvature_decay
        decay = 1 - self.temperature * new if self.paper_tau else self.curvature_decay
        border = self.layout.size
        rates = [r * self.lr_scale for r in halves(self.rates, border)]
        common = Update(
            lr=rates[0],
            keep=keeps[0],
            take=1 - self.momentum_decay if self.averaged else 1.0,
            debias=1 / (1 - self.momentum_decay ** (self.steps + 1)) if self.averaged else 1.0,
            decay=decay if self.has_curvature else 0.0,
            renew=new if self.has_curvature else 1.0,
            damping=self.damping,
            gradient_scale=1 / found.shares,
            curvature_scale=found.curvature_weight / found.shares,
        )
        with_prior = replace(
            common,
            shift=self._shift(),
            prior_mean=self.prior.mean,
            prior_precision=precision_of(self.prior),
            variance=self._variance()[0],
        )
        return with_prior, replace(common, lr=rates[1], keep=keeps[1])

    def _weights(self) -> dict[str, Tensor]:
        names = self.split.rest if self.is_noisy else self.split.layout.names
        own = {name: p.detach() for name, p in parameters_at(self.model, names).items()}
        return {**self.layout.split(self._flat_draw()), **own} if self.is_noisy else own

    def _checked(self, nll: Nll) -> Nll:
        before = likelihood_gradients(self.descent)

        def checked(net: nn.Module) -> Tensor:
            put_back_(self.descent, before)  # a pass that is run again counts once
            value = nll(net)
            if isinstance(value, Tensor) and value.numel() == 1:
                check_loss(value.item(), self)
            return value

        return checked

    # -- saving ----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which have no private copy of the network yet."""
        return {**self.__dict__, "plan": self.plan.on(self.model)}

    def get_extra_state(self) -> dict[str, Any]:
        """Also the rate of the last step."""
        return {**super().get_extra_state(), "last_scale": self._last_scale, "lr": self._config["lr"]}

    def set_extra_state(self, state: Any) -> None:
        """Continue exactly where `get_extra_state` was called, also if that was at another `lr`."""
        super().set_extra_state(state)
        last = last_scale(state, self._config["lr"], self.split)
        self._last_scale = last.to(self.momentum.device) if isinstance(last, Tensor) else last

    def _progress(self) -> list[int]:
        return [self.steps, int(self.has_curvature)]

    def _set_progress(self, saved: list[int]) -> None:
        self.steps, self.has_curvature = saved[0], bool(saved[1])


@dataclass
class _Pass:
    """What one pass found; squares are to be multiplied by `weight`."""

    loss: float
    gradients: dict[str, Tensor]
    squares: dict[str, Tensor]
    weight: float

    def plus_(self, other: _Pass) -> _Pass:
        """Both together; the tensors of both are used up."""
        self.loss += other.loss
        torch._foreach_add_([*self.gradients.values()], [other.gradients[n] for n in self.gradients])
        ratio = other.weight / self.weight
        torch._foreach_add_([*self.squares.values()], [other.squares[n] for n in self.squares], alpha=ratio)
        return self


def _times(nll: Nll, factor: float, net: nn.Module) -> Tensor:
    return factor * scalar_loss(nll(net))


def _attack_of(noise: AdversarialSampling | Mapping[str, Any] | str) -> AdversarialSampling | None:
    """The choice of the worst noise near a draw, if that is meant."""
    if not is_attack(noise):
        if noise != "weights":
            raise unknown_noise(noise, ("weights", ADVERSARIAL))
        return None
    attack = make_attack(noise)
    if attack.kl_in_weight:
        raise ValueError("kl_in_weight repeats a loss with a KL term, which VOGN's step has not: use BBB for it.")
    return attack
