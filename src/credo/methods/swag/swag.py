"""SWAG: a Gaussian with the moments of the weights that an optimiser visits at a rate that stays up.

Of the weights θ₁ … θₙ that are collected, θ̄ᵢ is the mean of the first i. With dᵢ = √((i−1)/i)·(θᵢ − θ̄ᵢ₋₁), the sum of
all dᵢdᵢᵀ / (n−1) is their sample covariance (Welford 1962); σ² is its diagonal, D holds the last k = min(rank, n−1) of
the dᵢ as columns. A draw is (Maddox et al. 2019)

    w = θ̄ₙ + √(scale/2)·(σ⊙z₁ + D z₂/√k),    z₁, z₂ standard normal,

so that diagonal and low-rank part carry one half of the variance each; w = θ̄ₙ + √scale·σ⊙z₁ for rank=0. Their s is
scale/2. They take deviations from θ̄ᵢ, which are smaller by √((i−1)/i), and divide by rank − 1 instead of k, also if
fewer were collected. At scale=0 this is SWA, stochastic weight averaging (Izmailov et al. 2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.description import Description
from credo.core.errors import CredoWarning, NonFiniteError
from credo.core.likelihood import Likelihood
from credo.core.network.batchnorm import tracking_layers
from credo.core.network.flat_layout import Layout
from credo.core.network.selection import Random, all_names, one_device, random_names
from credo.core.network.substitute import parameters_at
from credo.core.optimizer_step import GradientPosterior, OptimizerStep, is_finite, trainable
from credo.core.optimizers import Optimizer, OptimizerFunction, Rates
from credo.core.posterior import Nll, Terms
from credo.core.prior import Prior, make_prior
from credo.core.support.user_warnings import warn
from credo.core.support.validate import checked_count, is_count, is_number
from credo.core.thread_safety import changes_weights, checked_once, exclusively
from credo.methods.swag.moments import RunningMoments
from credo.methods.swag.statistics import DrawStatistics

# `fit` lets from half of this number to all of it be collected.
MOST_COLLECTED = 40
# Least factor on the learning rate while weights are collected by `fit`.
COLLECT_LR = 1.0


class SWAG(GradientPosterior):
    """Mean and covariance of the weights at the end of an ordinary training; the network at the mean is SWA.

    While it trains, the network holds the optimiser's weights; `end_training_`, which `fit` calls, puts the mean in
    their place, and the next `step` puts them back. A network with BatchNorm is a point estimate until then, since
    neither mean nor draws have running statistics before.

    Args:
        model: The network.
        data_size: Number of training examples, which log p(w) is divided by.
        rank: Number of deviations that are kept, each as large as the random parameters; 0: variances alone.
        every: Steps from one collection to the next; None: `fit` plans 20 to 40 of them, otherwise 1.
        start: When collecting begins: a fraction of the training that `fit` plans (without a plan at once), or a whole
            number of steps.
        scale: Factor on the covariance: 1 has the variances of the collected weights, 0 is SWA.
        collect_lr: Least factor on the learning rate while collecting: weights that have come to rest have no spread.
            None: 1 under `fit`, whose schedule ends at 0, otherwise 0, the schedule alone (a cyclical one).
        batchnorm_draws: For networks with BatchNorm, number of draws that `end_training_` fixes with running statistics
            of their own; 0: fresh draws with those of the mean network.
        prior: An object, its description, or a Gaussian's standard deviation; None: maximum likelihood.
        random: Which parameters have noise and prior, as in `random_names`. All trainable ones are averaged.
        optimizer: An `Optimizer`, a mapping such as `{"name": "sgd", "momentum": 0.9, "clip_norm": 1.0}`, a name of
            `OPTIMIZERS`, or a function from parameters to an optimiser.
        lr: Learning rate of an optimiser given by name, or rates by parameter name globs.
        likelihood: What the outputs mean: an object, its description or name; None: categorical.
        seed: Start of the posterior's own random numbers.
    """

    tunable: ClassVar[Mapping[str, tuple[float, float]]] = {"lr": (3e-4, 3e-2), "scale": (0.1, 10.0)}

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        rank: int = 20,
        every: int | None = None,
        start: float = 0.5,
        scale: float = 1.0,
        collect_lr: float | None = None,
        batchnorm_draws: int = 32,
        prior: Prior | Mapping[str, Any] | float | None = None,
        random: Random = "all",
        optimizer: Optimizer | Mapping[str, Any] | OptimizerFunction | str = Optimizer(),
        lr: Rates = 1e-3,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        _check(start, scale, collect_lr)
        rank = checked_count("rank", rank, least=0, what="deviations")
        batchnorm_draws = checked_count("batchnorm_draws", batchnorm_draws, least=0, what="draws")
        self.every = 1 if every is None else checked_count("every", every, what="steps")
        self.start, self.scale, self.collect_lr = start, float(scale), float(collect_lr or 0.0)
        self.length = 0  # steps of the training that was planned
        names = random_names(model, random)
        self.arguments["random"] = names
        points = [n for n, p in model.named_parameters() if p.requires_grad and n not in set(names)]
        parameters = parameters_at(model, [*names, *points])
        device = one_device(parameters)
        self.averaged = Layout(parameters, least=torch.float32)  # the random ones first
        self.layout = Layout({name: parameters[name] for name in names}, least=torch.float32, known=all_names(model))
        shape: dict[str, Any] = {"random": self.layout.size, "rank": rank}
        self.moments = RunningMoments(self.averaged.size, **shape, dtype=self.averaged.dtype, device=device)
        self.statistics = DrawStatistics(model, batchnorm_draws) if tracking_layers(model) else None
        self._iterate: dict[str, Tensor] | None = None  # the optimiser's weights while the network holds the mean
        self.prior = None
        if prior is not None:
            self.prior = make_prior(prior).bind(self.layout, data_size=self.data_size, device=device)
        self.optimizer_step = OptimizerStep(trainable(self), optimizer, lr)

    # -- the distribution --------------------------------------------------------------------------------------

    @property
    def collected(self) -> int:
        """Number of weights that the mean is of."""
        return self.moments.count

    @property
    def is_random(self) -> bool:
        """Whether there is any noise: not before two weights were collected, nor for `scale=0`."""
        return self.scale > 0 and self.collected > 1 and self._is_ready

    @property
    def uncertainty_needs(self) -> str:
        """Collected weights, unless there are enough of them."""
        if self.collected >= (2 if self.scale else 1):
            return ""
        return (
            "weights that were collected: train it by credo.fit(posterior, loader, epochs=…), or call collect_() after "
            "steps of a loop of your own, and then end_training_(loader)"
        )

    @property
    def _is_ready(self) -> bool:
        """Whether draws are those of SWAG; else they are the network as it is."""
        return self.collected > 0 and (self.statistics is None or bool(self.statistics.are_found))

    def draw(self) -> dict[str, Tensor]:
        """Weights of one network, with its running statistics if it has some; `{}` before there is a mean."""
        return self._network(self._number(), 1.0)

    def iter_draws(self, count: int) -> Iterator[dict[str, Tensor]]:
        """`count` draws, one at a time; where a number of draws is fixed, these in turn, from any of them on."""
        first = self._number()
        for index in range(count):
            yield self._network(None if first is None else first + index, self.noise_scale)

    def _number(self) -> int | None:
        """The number of a fixed draw; None where draws are fresh."""
        if self.collected and not self._is_ready and not self.steps:
            warn(
                "Weights were collected, but the network's running statistics belong to the last of them: predictions "
                "are of that network alone. Call end_training_(loader) with the training batches first.",
                CredoWarning,
            )
        if not self.is_random or self.statistics is None or not self.statistics.draws:
            return None
        return int(torch.randint(self.statistics.draws, (), generator=self.generator, device=self.device))

    def _network(self, number: int | None, noise_scale: float) -> dict[str, Tensor]:
        """A fixed draw, or for None a fresh one, with `noise_scale` times its noise, and its running statistics."""
        with nullcontext() if self.guard.is_private else self.guard.exclusive(self):
            if not self._is_ready:
                return {}
            found = {} if self.statistics is None else self.statistics.of(number, noise_scale)
            return {**self._weights(number, noise_scale), **found}

    @torch.no_grad()
    def _weights(self, number: int | None, noise_scale: float) -> dict[str, Tensor]:
        weights, factor = self.moments.mean.clone(), noise_scale * math.sqrt(self.scale)
        if factor and self.collected > 1:
            weights[: self.layout.size].add_(self.moments.noise(self._generator_of(number)), alpha=factor)
        return self.averaged.split(weights)

    def _generator_of(self, number: int | None) -> torch.Generator:
        if number is None or self.statistics is None:
            return self.generator
        return self.statistics.generator(number)

    def mean(self) -> dict[str, Tensor]:
        """Means of the random parameters: the network's own weights before any were collected."""
        if not self.collected:
            return {name: p.detach().clone() for name, p in parameters_at(self.model, self.layout.names).items()}
        return self.layout.split(self.moments.mean[: self.layout.size].clone())

    def std(self) -> dict[str, Tensor]:
        """Standard deviation of each random weight by itself; zero before two were collected."""
        return self.layout.split((self.scale * self.moments.variances()).sqrt())

    # -- training ----------------------------------------------------------------------------------------------

    def plan_training_(self, *, steps: int, epochs: float) -> None:
        """Choose `every` and `collect_lr`, if they were left open, and collect anew in a training of `steps` steps."""
        self.length = steps
        self.moments.forget_()
        if self.arguments["every"] is None:
            self._set_planned("every", max(1, math.ceil((steps - self._steps_before()) / MOST_COLLECTED)))
        if self.arguments["collect_lr"] is None:
            self._set_planned("collect_lr", COLLECT_LR)

    def _set_planned(self, name: str, value: float) -> None:
        super()._set_planned(name, value)
        setattr(self, name, value)

    def _steps_before(self) -> int:
        """Steps before collecting begins; a planned training has at least two after it."""
        if is_count(self.start, least=0):
            return int(self.start)
        return min(round(self.start * self.length), max(self.length - 2, 0))

    def lr_factor(self, step: int) -> float:
        """`lr_scale`, but no less than `collect_lr` if weights are collected in a `step`."""
        return max(self.lr_scale, self.collect_lr) if step >= self._steps_before() else self.lr_scale

    @contextmanager
    def _prepared(self, nll: Nll, examples: float | None, weights: Tensor | None) -> Iterator[Callable[[], Terms]]:
        self._resume()
        with super()._prepared(nll, examples, weights) as update:
            yield update

    def _update(self, terms: Terms) -> Terms:
        terms = super()._update(terms)
        done = self.steps - self._steps_before()
        if done > 0 and done % self.every == 0:
            self._collect()
        return terms

    @exclusively
    @checked_once
    @changes_weights
    def collect_(self) -> None:
        """Collect the network's weights as they are, after a step of any optimiser; `step` does it by itself.

        When all are collected, `end_training_(loader)` puts the mean into the network.
        """
        self._iterate = None  # of an earlier training
        self._collect()

    def _collect(self) -> None:
        weights = self.averaged.flatten(dict(self.model.named_parameters())).detach()
        if not is_finite(weights):
            bad = next(name for name, tensor in self.averaged.split(weights).items() if not is_finite(tensor))
            raise NonFiniteError(f"The weights are not collected: {bad} is not finite. Try a smaller lr.")
        self.moments.add_(weights)
        if self.statistics is not None:
            self.statistics.are_found.fill_(False)

    @exclusively
    @checked_once
    @changes_weights
    @torch.no_grad()
    def end_training_(self, loader: Iterable[Any]) -> None:
        """Put the mean into the network; with BatchNorm, find running statistics for it and for the fixed draws.

        The next `step` continues from the optimiser's weights, a loop of your own from the mean.

        Args:
            loader: The training batches, tensors or (inputs, …); they are read only if there are statistics to find.
        """
        if self.collected < (2 if self.scale else 1):
            warn(
                f"SWAG has collected weights {self.collected} times, which is too few: predictions are of one network. "
                f"Collecting begins after {self._steps_before()} steps, and {self.steps} were made: train longer, or "
                "set start lower.",
                CredoWarning,
            )
        if not self.collected:
            return
        if self.statistics is not None:
            with self.snapshot(copies="none") as private:
                private.eval()
                self.statistics.find_(private.model, loader, self._weights, self.seed, self.process_group)
        mean = self._network(None, 0.0)
        if self._iterate is None:
            own = self._tensors()
            self._iterate = {name: own[name].detach().clone() for name in mean}
        self._put(mean)

    @torch.no_grad()
    def _resume(self) -> None:
        """Put the optimiser's weights, and their running statistics, back into the network."""
        if self._iterate is not None:
            self._put(self._iterate)
            self._iterate = None

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        own = self._tensors()
        for name, tensor in tensors.items():
            own[name].copy_(tensor)

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    # -- inspection and state ----------------------------------------------------------------------------------

    def describe(self) -> Description:
        """The prior if there is one, and the numbers of the covariance."""
        numbers = self.moments.squares.numel() + self.moments.deviations.numel()
        if self.statistics is not None:
            numbers += 2 * self.statistics.means.numel()
        if self.prior is None:
            return Description(has_prior=False, spread_count=numbers)
        return Description(prior=self.prior, layout=self.layout, spread_count=numbers)

    def get_extra_state(self) -> dict[str, Any]:
        """Also the length of the planned training, and the optimiser's weights if the network holds the mean."""
        return {**super().get_extra_state(), "length": self.length, "iterate": self._iterate}

    def set_extra_state(self, state: Any) -> None:
        """Continue exactly where `get_extra_state` was called.

        Args:
            state: What it returned.
        """
        super().set_extra_state(state)
        self.length = int(state["length"])
        given = state["iterate"]
        self._iterate = None if given is None else {name: tensor.clone() for name, tensor in given.items()}


def _check(start: float, scale: float, collect_lr: float | None) -> None:
    """Raise ValueError for numbers that are not possible."""
    if not is_count(start, least=0) and not (is_number(start) and 0 <= start < 1):
        raise ValueError(
            f"start={start!r:.80} must be a fraction of the training, from 0 to below 1, or a whole number of steps."
        )
    if not (is_number(scale) and 0 <= scale < math.inf):
        raise ValueError(f"scale={scale!r:.80} must be a number, 0 (no noise) or more.")
    if collect_lr is not None and not (is_number(collect_lr) and 0 <= collect_lr < math.inf):
        raise ValueError(f"collect_lr={collect_lr!r:.80} must be a number, 0 or more, or None.")
