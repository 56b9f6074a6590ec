"""The interface of all methods: a module around an untouched network that draws, steps and predicts."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.counts import is_count
from credo.core.divergence import Watch
from credo.core.errors import UnsupportedModelError
from credo.core.likelihood import Likelihood, make_likelihood
from credo.core.pruned import joined_masks, masks_by_name, zero_outside_
from credo.core.team import Team
from credo.core.weights import Draw, aliases, check_model, substituted

Nll = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Terms:
    """What one step minimised: loss = nll + penalty.

    `nll` is a mean over examples, `penalty` the prior's share (temperature·weight·KL/data_size for a variational
    method, −log p(w)/data_size for a point estimate), `kl` the KL itself in nats, None where there is none.
    """

    loss: float
    nll: float
    penalty: float = 0.0
    kl: float | None = None


class Posterior(nn.Module, ABC):
    """A distribution over the weights of `model`, whose own parameters are its mean (or the point weights).

    Owns its random generator: nothing reads or reseeds the global one. `lr_scale` multiplies every learning rate, for
    schedules; `steps` counts updates. Both the generator's state and the optimiser's are part of `state_dict()`.
    `team`, if any, are the processes that make its steps together (`distribute`).
    """

    model: nn.Module
    likelihood: Likelihood
    kept: Tensor | None
    team: Team | None = None
    steps_in_team: ClassVar[bool] = False
    """Whether a step, if there is a team, averages over it all that differs between its processes."""

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module) or isinstance(model, Posterior):
            wanted = f"{type(self).__name__} needs a network, an nn.Module instance"
            raise ValueError(f"{wanted}; got {_name(model)}.{_about_groups(model)}")
        check_model(model)
        if not is_count(data_size):
            raise ValueError(f"data_size={data_size!r} must be the number of training examples, a positive integer.")
        self.model = model
        self.likelihood = make_likelihood(likelihood)
        self.data_size = int(data_size)
        self.seed = int(seed)
        self.steps = 0
        self.lr_scale = 1.0
        self._watch = Watch()
        self._aliases = aliases(model)
        self.register_buffer("kept", None)
        self._generator = torch.Generator(self.device).manual_seed(self.seed)

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        tensor = next(self.model.parameters(), None)
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def generator(self) -> torch.Generator:
        """The source of all of this posterior's randomness, on the network's device."""
        if self._generator.device.type != self.device.type:
            self._generator = torch.Generator(self.device).manual_seed(self.seed)
        return self._generator

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """While open, randomness comes from a generator of its own: evaluating never changes training."""
        before = self.generator
        self._generator = torch.Generator(self.device).manual_seed(seed)
        try:
            yield
        finally:
            self._generator = before

    def _reseed(self, *place: int) -> None:
        """In a team, all that is random from here on is a function of seed, step, place and part of the data alone.

        So any process can take any place, also after a restart with more or fewer of them.
        """
        if self.team is not None:
            self.generator.manual_seed(self.team.seed_for(self.seed, self.steps, *place))

    def _begin_pass(self, count: int, draws: int = 1) -> None:
        """Reseed for the pass that comes after `count` others of a step; after `draws`, it is for more data."""
        if self.team is not None:
            part, index = divmod(count, draws)
            self._reseed(self._draw_number(index, draws), part)

    def _draw_number(self, index: int, draws: int = 1) -> int:
        """The number of one of our `draws` among those of all processes that see the same data."""
        return index if self.team is None else self.team.mc_rank * draws + index

    @property
    def parts(self) -> list[Posterior]:
        """The posteriors that this one is an equal mixture of; itself, if it is none."""
        return [self]

    @property
    def is_random(self) -> bool:
        """Whether there is more than its parts to draw; a point estimate is not random."""
        return True

    def whole_draws(self, wanted: int) -> int:
        """How many draws to make where `wanted` are asked for: the same number from every part, one if not random."""
        count = len(self.parts)
        return -(-wanted // count) * count if self.is_random else count

    @abstractmethod
    def draw(self) -> dict[str, Tensor]:
        """Weights of one network from the posterior, by parameter name; `{}` means the mean."""

    def draws(self, count: int) -> Iterator[dict[str, Tensor]]:
        """`count` draws, one at a time; a mixture spreads them evenly over its parts."""
        for _ in range(count):
            yield self.draw()

    def noise(self) -> AbstractContextManager[None]:
        """Activation noise that belongs to a pass while open; none by default."""
        return nullcontext()

    @contextmanager
    def sampled(self, draw: Draw | None = None) -> Iterator[nn.Module]:
        """The network as one draw (a fresh one unless given), for any use inside; undone on exit."""
        weights = self.draw() if draw is None else draw
        with substituted(self.model, weights, self._aliases), self.noise():
            yield self.model

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """One stochastic pass."""
        with self.sampled() as net:
            return net(*inputs, **options)

    @abstractmethod
    def step(self, nll: Nll) -> Terms:
        """One update. `nll(net)` gives the batch's *mean* negative log-likelihood and may be called several times."""

    def _stepped(self, terms: Terms) -> Terms:
        """Count a step that is done, and warn if training has diverged; the same terms."""
        self.steps += 1
        # Autocast keeps casts of parameters until its region ends: a loop inside of one would train on old weights.
        torch.clear_autocast_cache()
        self._watch.after_step(terms.nll, self)
        return terms

    @contextmanager
    def prepared(self, nll: Nll) -> Iterator[Callable[[], Terms]]:
        """A step up to its first change: what may fail is done on entry, and what it yields makes the update.

        Left by an error without that, all is as before: so several posteriors step together or not at all. A method
        that does not split its step has nothing done on entry, and the whole of it in the update.
        """
        yield partial(self.step, nll)

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Constructor arguments as JSON-able values, so that a saved file can rebuild the posterior."""

    def masks(self) -> dict[str, Tensor]:
        """Which weights are not pruned, by parameter name."""
        return masks_by_name(self.model, self.kept)

    def keep_(self, masks: Mapping[str, Tensor]) -> None:
        """Prune for good: weights are zero in the mean and in every draw where their parameter's mask is False.

        Training goes on with the others, and the KL is theirs; what was pruned before stays so.
        """
        raise UnsupportedModelError(
            f"{type(self).__name__} cannot be pruned: that needs weights which are independent of each other, as those "
            "of MAP, BBB, VOGN and IVON are. Of an ensemble, prune the parts."
        )

    def _keep(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Zero means outside the masks, for every parameter together with what was pruned before."""
        kept = joined_masks(self.model, masks, self.kept)
        self.kept = kept
        zero_outside_(self.model, kept)
        return self.masks()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        kept = state_dict.get(f"{prefix}kept")
        if kept is not None and self.kept is None:
            self.keep_(masks_by_name(self.model, kept))  # vectors of the posterior get their length by it
        elif kept is not None and not torch.equal(kept, torch.as_tensor(self.kept).to(kept.device)):
            raise ValueError("The state was pruned otherwise than this posterior: load it into one that is not pruned.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _use(self, part: Posterior) -> None:
        """Take the network and likelihood of a part as this posterior's own, without registering them twice."""
        for name in ("model", "likelihood"):
            self._modules.pop(name, None)
            self.__dict__[name] = getattr(part, name)

    def _optimizer(self) -> torch.optim.Optimizer | None:
        return None

    def get_extra_state(self) -> dict[str, Any]:
        """What continuing needs beyond tensors by name: generator, step count, optimiser."""
        optimizer = self._optimizer()
        return {
            "generator": self.generator.get_state(),
            "steps": self.steps,
            "optimizer": optimizer.state_dict() if optimizer else None,
        }

    def set_extra_state(self, state: Any) -> None:
        """Continue exactly where `get_extra_state` was called."""
        self.generator.set_state(state["generator"].cpu())
        self.steps = int(state["steps"])
        optimizer = self._optimizer()
        if optimizer and state["optimizer"] is not None:
            # A copy: torch's optimisers keep the tensors they are given and would share them with whoever made them.
            optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


def _name(thing: Any) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"


def _about_groups(given: Any) -> str:
    if not isinstance(given, Iterable) or isinstance(given, nn.Module):
        return ""
    return (
        " What torch's optimisers take as parameter groups is given by name: lr={'head.*': 0.1, '*': 0.01}, "
        "prior_precision={'*.bias': 1.0, '*': 10.0}."
    )


class GaussianPosterior(Posterior, ABC):
    """A posterior that is Gaussian and independent for each random weight."""

    @abstractmethod
    def mean(self) -> dict[str, Tensor]:
        """Posterior means of the random parameters, by name; detached copies share no memory with the network."""

    @abstractmethod
    def std(self) -> dict[str, Tensor]:
        """Posterior standard deviations of the random parameters, by name."""
