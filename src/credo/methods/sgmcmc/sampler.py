"""What SGLD and SGHMC share: the Langevin step, its stages, and a posterior that is the samples it has kept.

With L(w) = mean NLL − T·log p(w)/N, friction α, rate ε and a preconditioner G that does not change while it samples,

    v ← (1 − α)·v − √(ε·G)·∇L(w) + √(2·α·T/N)·z,    w ← w + √(ε·G)·v,    z standard normal,

has the stationary density p(w)·p(data | w)^(1/T), up to terms of order ε (Chen et al. 2014, whose velocity is √(ε·G)·v;
α = 1 is Langevin dynamics, Welling and Teh 2011). v has the variance T/N at every rate, so a schedule may change it.
N enters the noise once. Where L is quadratic with curvature h the variance T/(N·h) comes out
larger by the factor 1/(1 − ε·G·h/(2(2 − α))), and mini-batches add their own noise: ε·G·C/(2·α) to T/N, where C is the
variance of the batch's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.description import Description, KeptChains
from credo.core.errors import CredoWarning, NonFiniteError, unknown
from credo.core.network.selection import Random, one_device
from credo.core.network.substitute import parameters_at
from credo.core.optimizer_step import (
    GradientPosterior,
    OptimizerStep,
    check_dense,
    is_finite,
    scalar_loss,
    trainable,
)
from credo.core.optimizers import Rates
from credo.core.posterior import Nll, Terms
from credo.core.prior import Gaussian, Prior, Value, make_prior, one_prior
from credo.core.support.user_warnings import warn
from credo.core.support.validate import checked_count, is_count, is_number
from credo.methods.kept_samples import KeptSamples
from credo.methods.natural.parameter_vector import ParameterVector
from credo.methods.planning import LONG_TRAINING, planned_temperature
from credo.methods.sample_files import checked_folder
from credo.methods.sgmcmc.langevin import LangevinStep, squared_norms
from credo.methods.sgmcmc.schedules import SCHEDULES, Stages

# Adam's rate for what is not sampled: the likelihood's own parameters, such as a learned noise.
_LIKELIHOOD_LR = 1e-2
# A cycle planned by `fit` has at least so many epochs and steps; there are at most so many cycles.
_CYCLE_EPOCHS, _CYCLE_STEPS, _MOST_CYCLES = 10, 100, 4
# Part of each cycle, or of the training if there are none, before samples are kept.
_BURN_IN = {True: 0.8, False: 0.5}


class StochasticGradientSampler(GradientPosterior):
    """A chain of weights, and the posterior of those that were kept; methods choose friction and preconditioner."""

    is_linearisable = False  # its samples do not lie around the network's own weights
    has_noise_scale = False  # a sample that is moved towards the mean of the others is no sample
    _not_in_config: ClassVar[tuple[str, ...]] = ("prior_precision",)
    _folders: ClassVar[tuple[str, ...]] = ("samples_dir",)

    def _set_up(
        self,
        *,
        samples: int,
        samples_dir: Path | str | None,
        every: int | None,
        burn_in: float | None,
        schedule: str | None,
        cycles: int | None,
        temperature: float | None,
        friction: float,
        precondition: bool,
        prior: Prior | Mapping[str, Any] | float | None,
        prior_precision: Value | None,
        random: Random,
        lr: Rates,
    ) -> None:
        """Check the arguments and make what a chain needs."""
        _check(burn_in, schedule, temperature)
        samples = checked_count("samples", samples, what="weights to keep")
        self.every = 1 if every is None else checked_count("every", every, what="steps")
        self.cycles = 1 if cycles is None else checked_count("cycles", cycles)
        self.schedule, self.length = schedule, 0
        self.burn_in = None if burn_in is None else _steps_or_fraction(burn_in)
        self.temperature = 1.0 if temperature is None else float(temperature)
        self.vector = ParameterVector(self.model, random)
        self.arguments["random"] = list(self.vector.random)
        device = one_device(parameters_at(self.model, self.vector.names))
        self.layout = self.vector.random_layout
        bound = make_prior(one_prior(prior, prior_precision))
        self.prior = bound.bind(self.layout, data_size=self.data_size, device=device)
        self.langevin = LangevinStep(self.vector, lr, friction=friction, precondition=precondition, device=device)
        folder = None if samples_dir is None else checked_folder(samples_dir)
        self.arguments["samples_dir"] = None if folder is None else str(folder)
        self.sampled_weights = KeptSamples(self.model, self.vector.layout, samples, device=device, folder=folder)
        self.optimizer_step = OptimizerStep(trainable(self), "adam", _LIKELIHOOD_LR)
        self._moving: dict[str, nn.Parameter] = {}  # what a step moves, while it does
        self._squared_norms: list[float] = []
        self._learns_likelihood = any(p.requires_grad for p in self.likelihood.parameters())

    # -- the distribution --------------------------------------------------------------------------------------

    @property
    def collected(self) -> int:
        """Number of samples that are kept."""
        return len(self.sampled_weights)

    @property
    def sample_files(self) -> list[Path]:
        """The files of the samples that are kept, in the order of the chain; none without `samples_dir`."""
        return self.sampled_weights.paths()

    @property
    def is_random(self) -> bool:
        """Whether there are several samples to draw from."""
        return self.collected > 1

    @property
    def uncertainty_needs(self) -> str:
        """Samples, unless there are several."""
        return "" if self.is_random else "samples, which are kept after the burn-in: train on, or set burn_in lower"

    def whole_draws(self, wanted: int) -> int:
        """No more draws than there are samples: each of them once is all that there is."""
        return min(wanted, max(self.collected, 1))

    def draw(self) -> dict[str, Tensor]:
        """One of the samples, with its running statistics; `{}`, the network as it is, before there is one."""
        return next(self.iter_draws(1))

    def iter_draws(self, count: int) -> Iterator[dict[str, Tensor]]:
        """`count` draws: all samples in turn from any of them on, or evenly spaced ones if there are more."""
        kept = self.sampled_weights
        chosen = kept.indices(count, self.generator)
        for index in range(count):
            with nullcontext() if self.guard.is_private else self.guard.exclusive(self):
                draw = kept.at(chosen[index]) if chosen else {}
            yield draw

    # -- training ----------------------------------------------------------------------------------------------

    def plan_training_(self, *, steps: int, epochs: float) -> None:
        """Choose `cycles`, `every` and `temperature`, if they were left open, and collect anew.

        A cyclical training that has no room for a second cycle gets a constant rate.

        Args:
            steps: Steps of the training.
            epochs: Times that every example is seen.
        """
        self.length = steps
        self.sampled_weights.forget_()
        given = self.arguments
        if given["cycles"] is None:
            self._set_planned("cycles", self._planned_cycles(steps, epochs))
            if self.schedule == "cyclical" and self.cycles == 1:
                # At the end of a single cycle the rate is so small that its samples are one network.
                self._set_planned("schedule", "constant")
        if given["temperature"] is None:
            self._set_planned("temperature", self._planned_temperature(epochs))
        if given["every"] is None:
            stages = self.stages
            sampling = sum(stages.steps_sampling(step) > 0 for step in range(steps))
            # At least one of each cycle, even if there are more cycles than room.
            self._set_planned("every", max(1, sampling // max(self.sampled_weights.capacity, self.cycles)))

    def _planned_cycles(self, steps: int, epochs: float) -> int:
        if self.schedule != "cyclical":
            return 1
        most = min(_MOST_CYCLES, self.sampled_weights.capacity, int(epochs // _CYCLE_EPOCHS), steps // _CYCLE_STEPS)
        return max(1, most)

    def _planned_temperature(self, epochs: float) -> float:
        """That of the other methods; 1 where the noise of the targets is learned.

        Under a posterior of temperature T the learned variance of n targets comes to rest at RSS/(n − T·p), p being the
        effective number of weights. At 1 it corrects for all of them, below it is too small, which few rows pay for.
        """
        if self._learns_likelihood and self.likelihood.task == "regression":
            return min(1.0, epochs / LONG_TRAINING)
        return planned_temperature(self.likelihood.task, epochs)

    def _set_planned(self, name: str, value: Any) -> None:
        super()._set_planned(name, value)
        setattr(self, name, value)

    @property
    def stages(self) -> Stages:
        """Which steps are burn-in, and which samples are kept."""
        is_cyclical = self.schedule == "cyclical"
        burn_in = _BURN_IN[is_cyclical] if self.burn_in is None else self.burn_in
        return Stages(self.schedule, self.length, self.cycles if is_cyclical else 1, burn_in, self.every)

    def lr_factor(self, step: int) -> float:
        """The factor of the sampler's own schedule in a `step`, or `lr_scale` where it has none or no plan."""
        factor = self.stages.factor(step)
        return self.lr_scale if factor is None else factor

    def _gradients(self, nll: Nll) -> Terms:
        """Set the gradients of the mean NLL, and of a prior that is no Gaussian with one mean and scale."""
        loss = data_term = nll(self._net)
        if self._prior_numbers is None:
            loss = scalar_loss(data_term) + self._penalty()
        self.optimizer_step.clear()  # what the loss itself may have left
        total = float(self.optimizer_step.backward(loss, at=self.steps))
        data = total if loss is data_term else data_term.item()
        del loss, data_term  # and the graph with them
        total, data = self._ready((total, data))
        return Terms(loss=total, nll=data, penalty=total - data)

    def _ready(self, losses: tuple[float, float]) -> Sequence[float]:
        """Average and check the gradients; the norms that the check needs are those that the preconditioner does."""
        self._moving = parameters_at(self.model, self.vector.names)
        own, ready = [*self._moving.values()], self.optimizer_step.ready
        if self.process_group is not None and self.process_group.defers:
            losses = ready(at=self.steps, losses=losses)  # type: ignore[assignment]
            self._squared_norms = squared_norms(own)
            return losses
        check_dense(dict(zip(self.vector.names, (p.grad for p in own), strict=True)))
        self._squared_norms = squared_norms(own)
        known = [p for p in own if p.grad is not None]
        return ready(at=self.steps, losses=losses, squared_norm=sum(self._squared_norms), normed=known)

    @property
    def _prior_numbers(self) -> tuple[float, float] | None:
        """Mean and std of a Gaussian prior that has one of each: the step itself adds its gradient."""
        return self.prior.numbers if isinstance(self.prior, Gaussian) else None

    def _penalty(self) -> Tensor:
        """What the prior adds to the loss: −T·log p(w)/N."""
        assert self.prior is not None
        weights = self.layout.flatten(parameters_at(self.model, self.layout.names))
        return -self.prior.log_prob(weights) * (self.temperature / self.data_size)

    @torch.no_grad()
    def _update(self, terms: Terms) -> Terms:
        self.likelihood.update_(self.steps)
        stages, step = self.stages, self.steps
        samples = stages.steps_sampling(step) > 0
        if self.process_group is not None:
            self.process_group.reseed_alike(self)  # every process makes the same step
        mean, std = self._prior_numbers or (0.0, math.inf)
        pull = self.temperature / (self.data_size * std**2)
        offsets = self.langevin.step_(
            self._moving,
            self._squared_norms,
            rate=self.lr_factor(step),
            variance=self.temperature / self.data_size,
            # A network that fits a few rows exactly takes a learned noise of the targets down with it.
            noisy=samples or not stages.is_cyclical or self.likelihood.task == "regression",
            prior=(mean, pull),
            adapts=not samples,
            generator=self.generator,
        )
        if self._prior_numbers is not None:
            terms = self._with_penalty(terms, offsets, std)
        self._move_likelihood()
        terms = self._stepped(terms)
        if stages.is_kept(step):
            self._keep_sample()
        return terms

    def _with_penalty(self, terms: Terms, offsets: float, std: float) -> Terms:
        log_prob = -0.5 * offsets / std**2 - self.layout.size * (math.log(std) + 0.5 * math.log(2 * math.pi))
        penalty = -log_prob * self.temperature / self.data_size
        return replace(terms, loss=terms.nll + penalty, penalty=penalty)

    def _move_likelihood(self) -> None:
        """Adam on the likelihood's own parameters; the network's have moved and have no gradient any more."""
        for parameter in self._moving.values():
            parameter.grad = None
        self._moving = {}
        if self._learns_likelihood:
            self.optimizer_step.move(scale=self.lr_scale)

    def _keep_sample(self) -> None:
        kept = self.sampled_weights
        if not kept.is_next_kept:
            kept.offer_({})  # counted only
            return
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        bad = next((n for n in self.vector.names if not is_finite(tensors[n])), None)
        if bad is not None:
            raise NonFiniteError(f"No sample is kept at step {self.steps}: {bad} is not finite. Try a smaller lr.")
        if self.process_group is not None:  # running statistics are of each process's own batches
            found = {name: tensors[name].clone() for name in kept.statistic_names}
            self.process_group.average_([*found.values()])
            tensors |= found
        kept.offer_(tensors)

    def end_training_(self, loader: Iterable[Any]) -> None:
        """Warn if the training was too short to keep samples.

        Args:
            loader: The training batches, which are not read.
        """
        if not self.is_random:
            warn(
                f"{type(self).__name__} has kept {self.collected} samples, so predictions are of one network. The "
                f"burn-in takes {self.stages.burn_in_steps()} steps of each cycle, and {self.steps} steps were made: "
                "train longer, or set burn_in or every lower.",
                CredoWarning,
            )

    # -- inspection and state ----------------------------------------------------------------------------------

    def describe(self) -> Description:
        """Prior and temperature, and the samples: one chain."""
        kept = self.sampled_weights
        return Description(
            prior=self.prior,
            layout=self.layout,
            temperature=self.temperature,
            spread_count=kept.stored_numbers(),
            chains=KeptChains(1, len(kept), lambda chain, index: kept.at(index)) if len(kept) else None,
        )

    def get_extra_state(self) -> dict[str, Any]:
        """Also the length of the planned training."""
        return {**super().get_extra_state(), "length": self.length}

    def set_extra_state(self, state: Any) -> None:
        """Continue exactly where `get_extra_state` was called.

        Args:
            state: What it returned.
        """
        super().set_extra_state(state)
        self.length = int(state["length"])


def _steps_or_fraction(burn_in: float) -> float:
    return int(burn_in) if is_count(burn_in, least=0) and not isinstance(burn_in, float) else float(burn_in)


def _check(burn_in: float | None, schedule: str | None, temperature: float | None) -> None:
    """Raise ValueError for values that are not possible."""
    if schedule is not None and schedule not in SCHEDULES:
        raise ValueError(unknown("schedule", str(schedule), SCHEDULES))
    if burn_in is not None and not is_count(burn_in, least=0) and not (is_number(burn_in) and 0 <= burn_in < 1):
        raise ValueError(
            f"burn_in={burn_in!r:.80} must be a whole number of steps, or a fraction of the training (of each cycle of "
            "the cyclical schedule), from 0 to below 1."
        )
    if temperature is not None and not (is_number(temperature) and 0 < temperature < math.inf):
        raise ValueError(f"temperature={temperature!r:.80} must be a positive number; 1 is the Bayes posterior.")
