"""What natural-gradient methods share: a Gaussian that gathers passes and updates, and its parts."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from credo.core.batchnorm import statistics_kept_on_error
from credo.core.inputs import same_inputs
from credo.core.posterior import GaussianPosterior, Nll, Terms
from credo.core.prior import Gaussian, Prior, Value, make_prior
from credo.core.squares.rules import widened
from credo.core.team import Team
from credo.core.weights import Layout, Random, one_device, parameters_at, random_names
from credo.methods.learned_noise import likelihood_descent, move_likelihood, ready_likelihood
from credo.methods.natural_checks import check_finite, refuse_loss
from credo.methods.natural_update import Part, Update


class NaturalGaussian(GaussianPosterior, ABC):
    """A mean-field Gaussian that gathers gradients and curvatures of some passes and makes one update from them.

    Momentum and curvature are vectors over all trainable parameters, the random ones first.
    """

    steps_in_team = True
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

    # -- training --------------------------------------------------------------------------------------------

    def step(self, nll: Nll) -> Terms:
        """Gather `draws` passes and update. Before there is a curvature, all would be the same pass at the mean."""
        with self.prepared(nll) as update:
            return update()

    @contextmanager
    def prepared(self, nll: Nll) -> Iterator[Callable[[], Terms]]:
        """A step whose passes are gathered and checked; what it yields makes the update."""
        with statistics_kept_on_error(self.model), self._gathered.dropped_on_error(self.team):
            nll = same_inputs(nll) if self._has_passes else nll
            for _ in range(self.step_draws if self.has_curvature else 1):
                self.gather(nll)
            yield self._ready()

    @property
    def _has_passes(self) -> bool:
        """Whether a step may run the loss more than once."""
        return True

    @abstractmethod
    def gather(self, nll: Nll) -> float:
        """One pass on a new draw whose gradients the next `update` averages in; returns its NLL.

        Several calls on parts of a batch are gradient accumulation.
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
            ready_likelihood(self.descent, found.count, at=self.steps)
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
        self.steps += 1
        nll = found.loss / found.count
        found.clear()
        return Terms(loss=nll + penalty, nll=nll, penalty=penalty, kl=kl)

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


class Split:
    """The trainable parameters of a network: the random ones first, then the rest; as vectors in single precision or
    more.
    """

    def __init__(self, model: nn.Module, random: Random) -> None:
        chosen = random_names(model, random)
        rest = [name for name, p in model.named_parameters() if p.requires_grad and name not in chosen]
        self.model, self.random, self.rest = model, tuple(chosen), tuple(rest)
        self.layout, self.random_layout, self.rest_layout = (
            Layout(parameters_at(model, names), least=torch.float32) for names in ([*chosen, *rest], chosen, rest)
        )

    def narrowed(self, masks: Mapping[str, Tensor]) -> tuple[Split, Tensor]:
        """The same without pruned weights, and which entries of all trainable ones stay."""
        new = copy.copy(self)
        new.layout, chosen = self.layout.narrowed(masks)
        new.random_layout, _ = self.random_layout.narrowed(masks)
        new.rest_layout, _ = self.rest_layout.narrowed(masks)
        return new, chosen

    def parts(self, momentum: Tensor, curvature: Tensor) -> tuple[Part, Part]:
        """The random parameters and the rest, each with its slices."""
        border = self.random_layout.size
        return (
            Part(parameters_at(self.model, self.random), momentum[:border], curvature[:border], self.random_layout),
            Part(parameters_at(self.model, self.rest), momentum[border:], curvature[border:], self.rest_layout),
        )

    def rates(self, lr: float | Mapping[str, float]) -> float | Tensor:
        """One rate, or a vector of rates from values by name glob."""
        values = [*lr.values()] if isinstance(lr, Mapping) else [lr]
        if not all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in values):
            raise ValueError(f"lr={lr} must be a non-negative number, or such numbers by parameter name.")
        return self.layout.fill(lr, what="lr")


class Gathered:
    """Sums over the passes since the last update: losses, gradients, and estimates of the curvature."""

    def __init__(self) -> None:
        self.leaves: Mapping[str, Tensor] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.count = 0
        self.loss = 0.0
        self.gradients: dict[str, Tensor] = {}
        self.curvatures: dict[str, Tensor] = {}
        self.curvature_weight = 1.0
        self.flat_curvature: Tensor | None = None

    def add(
        self, loss: float, gradients: Mapping[str, Tensor], curvatures: Mapping[str, Tensor], weight: float = 1.0
    ) -> None:
        """One pass, its curvatures to be multiplied by `weight`; its tensors are used up."""
        gradients = {name: widened(g) for name, g in gradients.items()}
        if self.count:
            torch._foreach_add_([*self.gradients.values()], [gradients[n] for n in self.gradients])
            if curvatures:
                relative = weight / self.curvature_weight
                torch._foreach_add_(
                    [*self.curvatures.values()], [curvatures[n] for n in self.curvatures], alpha=relative
                )
        else:
            self.gradients, self.curvatures, self.curvature_weight = gradients, dict(curvatures), weight
        self.count += 1
        self.loss += loss

    def check_free(self) -> None:
        """Refuse to take a draw that is in the network's place for the means."""
        if self.leaves is not None:
            raise RuntimeError("A draw is in the network's place already: trials, steps and draws do not nest.")

    @contextmanager
    def trying(self, leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """While open, `leaves` are the weights in the network's place; trials do not nest."""
        self.check_free()
        self.leaves = leaves
        try:
            yield
        finally:
            self.leaves = None

    @contextmanager
    def dropped_on_error(self, team: Team | None = None) -> Iterator[None]:
        """If what is inside fails, nothing stays gathered, and the team is told."""
        try:
            yield
        except BaseException as error:
            self.clear()
            if team is not None:
                team.failed(error)
            raise


def average_(found: Gathered, posterior: Any) -> None:
    """In a team, what was gathered becomes the mean over all processes' passes, as of one pass; and losses are checked.

    Also the gradients of the likelihood's own parameters.
    """
    team, descent = posterior.team, posterior.descent
    if team is None or not team.defers:
        return
    own = [*descent.parameters.values()] if descent is not None else []
    gradients = [*found.gradients.values(), *(p.grad for p in own if p.grad is not None)]
    curvatures = [*found.curvatures.values()]
    if found.flat_curvature is not None:
        curvatures.append(found.flat_curvature)
    with found.dropped_on_error(team):
        torch._foreach_mul_(gradients, 1 / found.count)
        if curvatures:
            torch._foreach_mul_(curvatures, found.curvature_weight / found.count)
        tensors = [*found.gradients.values(), *curvatures]
        (found.loss,) = team.average_step_(tensors, [found.loss / found.count], own)
        found.count, found.curvature_weight = 1, 1.0
        refuse_loss(found.loss, posterior)


def momentum_change(scale: float, last: float | Tensor | None) -> float | Tensor:
    """What the momentum is multiplied by where steps were `last` times as long as rates say, and now are `scale`."""
    if isinstance(last, Tensor):
        return torch.where(last > 0, scale / last, 1.0)
    return 1.0 if last is None or last in (0.0, scale) else scale / last


def last_scale(state: Mapping[str, Any], lr: float | Mapping[str, float], split: Split) -> float | Tensor | None:
    """The last step's scale as saved, relative to the rates `lr` instead of those it was saved with."""
    saved, last = state.get("lr", lr), state["last_scale"]  # without them in older states
    if last is None or saved == lr:
        return cast(float | Tensor | None, last)
    before, now = split.rates(saved), split.rates(lr)
    if isinstance(now, float | int) and not now:
        return math.inf
    return cast(float | Tensor, before / now * (last.to("cpu") if isinstance(last, Tensor) else last))


def halves(value: float | Tensor, border: int) -> tuple[float | Tensor, float | Tensor]:
    """A vector cut in two; a number twice."""
    return (value[:border], value[border:]) if isinstance(value, Tensor) else (value, value)


def gaussian_prior(
    prior: Prior | Mapping[str, Any] | float | None, precision: Value | None, split: Split, data_size: int, device: Any
) -> Gaussian:
    """The Gaussian prior over the random parameters, given as such or by its precision."""
    if prior is not None and precision is not None:
        raise ValueError("prior and prior_precision were given: they exclude each other.")
    if precision is not None:
        prior = Gaussian(0.0, _each(precision, lambda value: value**-0.5))
    bound = make_prior(prior).bind(split.random_layout, data_size=data_size, device=device)
    if type(bound) is not Gaussian:
        raise ValueError(f"Natural-gradient methods need a Gaussian prior; got {type(bound).__name__}.")
    return bound


def _each(value: Value, function: Any) -> Value:
    for entry in value.values() if isinstance(value, Mapping) else (value,):
        if not bool((torch.as_tensor(entry) > 0).all()):
            raise ValueError(f"prior_precision={value} must be positive.")
    if isinstance(value, Mapping):
        return {name: function(entry) for name, entry in value.items()}
    return function(value)  # type: ignore[no-any-return]


def precision_of(prior: Gaussian) -> float | Tensor:
    """1/std² of a Gaussian prior."""
    return prior.std**-2
