"""What natural-gradient methods share: a Gaussian that gathers passes and updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from credo.core.description import Description, WeightState
from credo.core.divergence import compare_draw
from credo.core.network.batchnorm import statistics_kept_on_error
from credo.core.network.flat_layout import Random, one_device, parameters_at
from credo.core.network.inplace_inputs import same_inputs
from credo.core.posterior import GaussianPosterior, Nll, Terms
from credo.core.prior import Gaussian, Prior, Value
from credo.methods.natural.accumulator import Gathered, average_
from credo.methods.natural.likelihood_params import likelihood_descent, move_likelihood, ready_likelihood
from credo.methods.natural.param_vector import Split, gaussian_prior
from credo.methods.natural.update import Part, Update
from credo.methods.natural.validate import check_finite


class NaturalGaussian(GaussianPosterior, ABC):
    """A mean-field Gaussian that gathers gradients and curvatures of some passes and makes one update from them.

    Momentum and curvature are vectors over all trainable parameters, the random ones first.
    """

    averages_over_processes = True
    momentum: Tensor
    curvature: Tensor
    progress: Tensor
    step_draws: int
    has_curvature = True
    _config: dict[str, Any]
    _last_scale: float | Tensor | None = None

    def _make_state(
        self,
        lr: float | Mapping[str, float],
        prior: Prior | Mapping[str, Any] | float | None,
        prior_precision: Value | None,
        random: Random,
        curvature: float,
        progress: tuple[int, ...],
    ) -> None:
        """What constructors do once their arguments are checked; `progress` is the shape of what is saved of it."""
        self.split = Split(self.model, random)
        self.layout = self.split.random_layout
        device = one_device(parameters_at(self.model, self.split.layout.names))
        self.prior = gaussian_prior(prior, prior_precision, self.split, self.data_size, device)
        rates = self.split.rates(lr)
        self.rates = rates.to(device) if isinstance(rates, Tensor) else rates
        # The layout's precision is single at least: in half, 0.999·s + 0.001·h would hardly ever move s.
        zeros = torch.zeros(self.split.layout.size, dtype=self.split.layout.dtype, device=device)
        self.register_buffer("momentum", zeros)
        self.register_buffer("curvature", torch.full_like(zeros, curvature))
        self.register_buffer("progress", torch.zeros(progress, dtype=torch.int64))
        self.descent = likelihood_descent(self.likelihood)
        self._gathered = Gathered()

    # -- the distribution ------------------------------------------------------------------------------------

    def draw(self) -> dict[str, Tensor]:
        """μ + σ·ε for every random parameter; the mean while there is no curvature yet."""
        flat_draw = self._flat_draw()
        if not torch.is_grad_enabled():
            return self.layout.split(flat_draw)
        means = self.layout.flatten(parameters_at(self.model, self.layout.names))
        return self.layout.split(means + (flat_draw - means.detach()))

    def mean(self) -> dict[str, Tensor]:
        """Posterior means: copies of the network's own parameters."""
        return {name: p.detach().clone() for name, p in parameters_at(self.model, self.layout.names).items()}

    def std(self) -> dict[str, Tensor]:
        """Posterior standard deviations; zero while there is no curvature yet."""
        return self.layout.split(self._std())

    def keep_(self, masks: Mapping[str, Tensor]) -> None:
        """Prune for good: momentum, curvature and the prior lose their entries, so that no update reaches them."""
        kept = self._keep(masks)
        self.prior = cast(Gaussian, self.prior.at(self.layout.narrowed(kept)[1]))
        self.split, chosen = self.split.narrowed(kept)
        self.layout = self.split.random_layout
        if isinstance(self.rates, Tensor):
            self.rates = self.rates[chosen.to(self.rates.device)]
        if isinstance(self._last_scale, Tensor):
            self._last_scale = self._last_scale[chosen.to(self._last_scale.device)]
        self.momentum, self.curvature = self.momentum[chosen], self.curvature[chosen]
        self._gathered.clear()

    @property
    @abstractmethod
    def variance_scale(self) -> float:
        """σ² is this over the curvature with prior and damping."""

    @abstractmethod
    def _flat_draw(self) -> Tensor:
        """A draw of the random parameters, detached, as one vector."""

    @abstractmethod
    def _std(self) -> Tensor:
        """Standard deviations as one vector."""

    @property
    def is_noisy(self) -> bool:
        """Whether draws differ from the mean."""
        return self.has_curvature

    # -- training --------------------------------------------------------------------------------------------

    def step(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> Terms:
        """Gather `draws` passes and update. Before there is a curvature, all would be the same pass at the mean."""
        with self.prepared(nll, examples=examples, weights=weights) as update:
            return update()

    @contextmanager
    def prepared(
        self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None
    ) -> Iterator[Callable[[], Terms]]:
        """A step whose passes are gathered and checked; what it yields makes the update."""
        with statistics_kept_on_error(self.model), self._gathered.dropped_on_error(self.process_group):
            nll = same_inputs(nll) if self._has_passes else nll
            for _ in range(self.step_draws if self.has_curvature else 1):
                self.gather(nll, examples=examples, weights=weights)
            if self.is_noisy:
                compare_draw(self, self._gathered.loss / self._gathered.shares, nll)
            yield self._ready()

    @property
    def _has_passes(self) -> bool:
        """Whether a step may run the loss more than once."""
        return True

    @abstractmethod
    def gather(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> float:
        """One pass on a new draw whose gradients the next `update` averages in; returns its NLL.

        Several calls on parts of a batch are gradient accumulation; parts of different size count right if all are
        given `examples` (see `step`).
        """

    def update(self) -> Terms:
        """One update from what was gathered since the last; `nll` is the mean over the passes."""
        return self._ready()()

    @torch.no_grad()
    def _ready(self) -> Callable[[], Terms]:
        """All of an update that may fail; what it returns changes the parameters."""
        found = self._gathered
        if not found.count:
            raise RuntimeError("Nothing was gathered: call gather(nll), or step(nll), which does both.")
        average_(found, self)
        parts, updates = self.split.parts(self.momentum, self.curvature), self._updates(found)
        curvatures = self._curvatures(found)
        (kl, squares), (_, others) = (
            part.inspect(update, found.gradients, curvatures) for part, update in zip(parts, updates, strict=True)
        )
        with found.dropped_on_error():
            check_finite(squares + others, (found.gradients, curvatures), self.steps)
            ready_likelihood(self.descent, found.shares, at=self.steps)
        return partial(self._move, parts, updates, curvatures, kl)

    @torch.no_grad()
    def _move(
        self, parts: tuple[Part, Part], updates: tuple[Update, Update], curvatures: Mapping[str, Tensor], kl: float
    ) -> Terms:
        found, first = self._gathered, not self.has_curvature
        for part, update in zip(parts, updates, strict=True):
            part.apply_(update, found.gradients, curvatures)
        move_likelihood(self.descent, scale=self.lr_scale)
        if first:  # there was no q yet
            self.has_curvature = True
            kl = parts[0].inspect(replace(updates[0], decay=1.0), found.gradients, curvatures)[0]
        penalty = self._penalty(kl)
        nll = found.loss / found.shares
        found.clear()
        return self._stepped(Terms(loss=nll + penalty, nll=nll, penalty=penalty, kl=kl))

    @abstractmethod
    def _updates(self, found: Gathered) -> tuple[Update, Update]:
        """The numbers of the update, for the random parameters and for the rest."""

    @abstractmethod
    def _curvatures(self, found: Gathered) -> Mapping[str, Tensor]:
        """The gathered curvature of every parameter."""

    @abstractmethod
    def _penalty(self, kl: float) -> float:
        """What this KL adds to the loss at the current step."""

    # -- saving ----------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        return {
            **self._config,
            "random": list(self.layout.names),
            "prior": self.prior.config(),
            "likelihood": self.likelihood.config(),
            "seed": self.seed,
        }

    def describe(self) -> Description:
        """Prior, temperature and curvature; σ² = variance_scale/(curvature + …)."""

        def refit(curvature: Tensor, mean: Tensor, before: Tensor, after: Tensor) -> Tensor:
            change = 1 / after.double() - 1 / before.double()
            return curvature + (self.variance_scale * change).to(curvature.dtype)

        everything = self.split.layout
        return Description(
            prior=self.prior,
            layout=self.layout,
            temperature=cast(Any, self).temperature,
            augmentation=self._config.get("augmentation", 1.0),
            spread_count=self.layout.size,
            has_curvature=self.has_curvature,
            state={
                "momentum": WeightState(self.momentum, everything),
                "curvature": WeightState(self.curvature, everything, refit if self.has_curvature else None),
            },
        )

    @abstractmethod
    def _progress(self) -> Any:
        """What saved files must know beside weights, momentum and curvature, as whole numbers."""

    @abstractmethod
    def _set_progress(self, saved: Any) -> None:
        """Continue from `_progress`."""

    def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
        self.progress.copy_(torch.tensor(self._progress(), device="cpu"))
        super()._save_to_state_dict(*args, **options)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}progress" in state_dict:
            self._set_progress(self.progress.tolist())

    def _optimizer(self) -> torch.optim.Optimizer | None:
        return None if self.descent is None else self.descent.optimizer
