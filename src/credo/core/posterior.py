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

from credo.core.arguments import as_json, recorded
from credo.core.description import Description
from credo.core.distributed.process_group import ProcessGroup
from credo.core.divergence import TrainingWatch
from credo.core.example_counts import Counted
from credo.core.likelihood import Likelihood, make_likelihood
from credo.core.network.selection import check_model
from credo.core.network.substitute import aliases
from credo.core.pruning import Prunable
from credo.core.support.validate import checked_seed, is_count
from credo.core.thread_safety import ThreadSafe, checked_once, exclusively

Nll = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Terms:
    """What one step minimised: loss = nll + penalty.

    `nll` is a mean over examples, `penalty` the prior's part (temperature·weight·KL/data_size for a variational
    method, −log p(w)/data_size for a point estimate), `kl` the KL itself in nats, None where there is none.
    """

    loss: float
    nll: float
    penalty: float = 0.0
    kl: float | None = None


class Posterior(ThreadSafe, Prunable, ABC):
    """A distribution over the weights of `model`, whose own parameters are its mean (or the point weights).

    A method implements `draw` and `step` (or `prepared`); its constructor arguments are recorded in `arguments`. It
    owns its random generator: nothing reads or reseeds the global one. `lr_scale` multiplies every learning rate, for
    schedules; `steps` counts updates. Generator and optimiser states are part of `state_dict()`.

    Args:
        model: The network; its parameters become the mean.
        data_size: Number of training examples, N in the objective.
        likelihood: How outputs are distributed, `"categorical"` by default; also an object or `{"kind": ...}`.
        seed: Start of all of its random numbers.
    """

    likelihood: Likelihood
    arguments: dict[str, Any]
    process_group: ProcessGroup | None = None
    """The processes that make its steps together, if any (`credo.distribute`)."""
    averages_over_processes: ClassVar[bool] = False
    """Whether a step, in a process group, averages all that differs between processes."""
    _not_in_config: ClassVar[tuple[str, ...]] = ()
    """Arguments that only initialise: what they gave is in the tensors."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Record constructor arguments of every method, also one written elsewhere."""
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            cls.__init__ = recorded(cls.__init__)  # type: ignore[method-assign]

    @recorded
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
        self.data_size, self.seed = int(data_size), checked_seed(seed)
        self.steps, self.lr_scale = 0, 1.0
        self._watch = TrainingWatch()
        self._aliases = aliases(model)
        self.register_buffer("kept", None)
        self._generator = torch.Generator(self.device).manual_seed(self.seed)

    # -- randomness --------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the network is."""
        tensor = next(self.model.parameters(), None)
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def generator(self) -> torch.Generator:  # type: ignore[override]
        """The source of all of this posterior's randomness, on the network's device."""
        if self._generator.device.type != self.device.type:
            self._generator = torch.Generator(self.device).manual_seed(self.seed)
        return self._generator

    def reseed_(self, seed: int) -> None:
        """Take random numbers from a new generator from here on."""
        self._generator = torch.Generator(self.device).manual_seed(checked_seed(seed))

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """While open, randomness comes from a generator of its own. Not for several threads: use a `snapshot` there."""
        parts = self.all_posteriors()
        before = [part.generator for part in parts]
        self.reseed_(seed)
        try:
            yield
        finally:
            for part, generator in zip(parts, before, strict=True):
                part._generator = generator

    def _reseed(self, *place: int) -> None:
        """When distributed, reseed from (seed, step, position, data shard).

        So results do not depend on which rank runs what, also after a restart with more or fewer processes.
        """
        if self.process_group is not None:
            self.generator.manual_seed(self.process_group.seed_for(self.seed, self.steps, *place))

    def _begin_pass(self, count: int, draws: int = 1) -> None:
        """Reseed for the pass that comes after `count` others of a step; after `draws`, it is for more data."""
        if self.process_group is not None:
            part, index = divmod(count, draws)
            self._reseed(self._draw_number(index, draws), part)

    def _draw_number(self, index: int, draws: int = 1) -> int:
        """The number of one of our `draws` among those of all processes that see the same data."""
        return index if self.process_group is None else self.process_group.mc_rank * draws + index

    # -- the distribution --------------------------------------------------------------------------------------

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

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """One stochastic pass."""
        with self.sampled() as net:
            return net(*inputs, **options)

    # -- training ----------------------------------------------------------------------------------------------

    @exclusively
    @checked_once
    def step(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> Terms:
        """One update.

        Args:
            nll: `nll(net)` gives the batch's *mean* negative log-likelihood, and may be called several times.
            examples: The number that the mean was divided by, in the units of `data_size`; None: the sum of `weights`,
                or without them the number of rows. Needed where some rows do not count (`ignore_index`, a mask) by
                methods that take squares of single rows' gradients, and where processes or gathered passes have
                different numbers; all others accept it.
            weights: How often each row counts in the loss, [rows], which then is Σ wᵢ·ℓᵢ / examples.
        """
        with self.prepared(nll, examples=examples, weights=weights) as update:
            return update()

    @contextmanager
    def prepared(
        self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None
    ) -> Iterator[Callable[[], Terms]]:
        """Split a step: everything that can fail runs on entry, and the yielded function applies the update.

        Left by an error without that, all is as before: so several posteriors step together or not at all. A method
        that overrides only `step` has nothing done on entry, and the whole of it in the update.
        """
        if type(self).step is Posterior.step:
            raise NotImplementedError(f"{type(self).__name__} implements neither `step` nor `prepared`.")
        yield partial(self.step, nll, **Counted(examples, weights).given())

    def _stepped(self, terms: Terms) -> Terms:
        """Count a step that is done, and warn if training has diverged; the same terms."""
        self.steps += 1
        # Autocast keeps casts of parameters until its region ends: a loop inside of one would train on old weights.
        torch.clear_autocast_cache()
        if terms.nll > self._watch.limit or self._watch.above:
            self._watch.after_step(terms.nll, self)
        return terms

    def describe(self) -> Description:
        """Properties that inspectors read; every method fills in those that it has."""
        return Description()

    # -- saving ------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Constructor arguments as JSON-able values, so that a saved file can rebuild the posterior.

        Prior and likelihood are as they are now; functions, which a file cannot hold, are None.
        """
        skipped = ("self", "model", "data_size", *self._not_in_config)
        given = {name: value for name, value in self.arguments.items() if name not in skipped}
        now = {name: getattr(self, name, None) for name in given}
        return {n: as_json(now[n] if hasattr(now[n], "config") else value) for n, value in given.items()}

    @exclusively
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Continue where `state_dict()` was called."""
        return super().load_state_dict(*args, **options)

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

    def describe(self) -> Description:
        """One standard deviation for each random weight that is not pruned."""
        masks = self.masks()
        return Description(spread_count=sum(int(masks[name].sum()) for name in self.std()))
