"""The interface of all methods: a module around an untouched network that draws, steps and predicts."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from credo.core.distributed.process_group import ProcessGroup
from credo.core.distributed.wrapped_networks import check_alone
from credo.core.divergence import TrainingWatch
from credo.core.errors import UnsupportedModelError
from credo.core.example_counts import Counted
from credo.core.likelihood import Likelihood, make_likelihood
from credo.core.network.isolation import NotIsolatedError
from credo.core.network.pruning_masks import joined_masks, masks_by_name, zero_outside_
from credo.core.network.selection import check_model
from credo.core.network.skeleton import Skeleton
from credo.core.network.substitute import Draw, aliases, parameters_at, substituted
from credo.core.support.validate import checked_seed, is_count
from credo.core.thread_guard import Guard, exclusive_context, exclusively

Nll = Callable[[nn.Module], Tensor]
# Methods that change a posterior or read what a step changes: every implementation of them holds the lock.
_EXCLUSIVE = ("step", "gather", "update", "draw", "keep_")
_EXCLUSIVE_CONTEXTS = ("prepared", "trial")
_BEGINS_STEP = ("step", "gather", "trial")


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
    `process_group`, if any, are the processes that make its steps together (`distribute`).

    Several threads may use one posterior. Draws go into private copies of the network's module tree, never into the
    network itself; a step holds a lock, and what predicts works on a `snapshot` between two steps.
    """

    model: nn.Module
    likelihood: Likelihood
    kept: Tensor | None
    process_group: ProcessGroup | None = None
    averages_over_processes: ClassVar[bool] = False
    """Whether a step, if there is a process group, averages over it all that differs between its processes."""
    _may_step = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Every method, also one written elsewhere, steps with the lock held, and is checked before its first step."""
        super().__init_subclass__(**options)
        own = {name: method for name, method in cls.__dict__.items() if name in (*_EXCLUSIVE, *_EXCLUSIVE_CONTEXTS)}
        for name, method in own.items():
            checked = _checked_once(method) if name in _BEGINS_STEP else method
            setattr(cls, name, (exclusive_context if name in _EXCLUSIVE_CONTEXTS else exclusively)(checked))

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
        self.guard = Guard()
        self.model = model
        self.likelihood = make_likelihood(likelihood)
        self.data_size = int(data_size)
        self.seed = checked_seed(seed)
        self.steps = 0
        self.lr_scale = 1.0
        self._watch = TrainingWatch()
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
        """While open, randomness comes from a generator of its own. Not for several threads: use a `snapshot` there."""
        parts = self.all_posteriors()
        before = [part.generator for part in parts]
        self.reseed_(seed)
        try:
            yield
        finally:
            for part, generator in zip(parts, before, strict=True):
                part._generator = generator

    def reseed_(self, seed: int) -> None:
        """Take random numbers from a new generator from here on."""
        self._generator = torch.Generator(self.device).manual_seed(checked_seed(seed))

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

    @exclusively
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Continue where `state_dict()` was called."""
        return super().load_state_dict(*args, **options)

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
    def snapshot(self, *, seed: int | None = None, copies: str = "trained") -> Iterator[Self]:
        """A private copy of this posterior as it is between two steps, for one thread; free to change its modes.

        It shares no module with the original, so draws, hooks and modes of the copy are seen by nobody else. Where the
        network cannot be copied this is the posterior itself, under its lock.

        Args:
            seed: Start of its random numbers; None goes on with those of the posterior.
            copies: Which tensors are copied: `"trained"` what training changes, `"parameters"` not the buffers, so that
                passes in train mode move running statistics, `"none"`. Gradients reach the original's parameters.
        """
        if self.guard.is_private:
            yield self
            return
        with self.guard.exclusive(self):
            skeleton = self.guard.take(self, copies)
            if skeleton is not None:
                self._give_generators(skeleton, seed)
        if skeleton is None:
            with self._under_lock(seed):
                yield self
            return
        try:
            yield skeleton.module
        except NotIsolatedError:
            for part in self.all_posteriors():
                part.guard.is_isolated = False
            raise
        finally:
            with self.guard.exclusive(self):
                if copies == "parameters":
                    skeleton.write_back()
                self.guard.give_back(skeleton, copies)

    def _give_generators(self, skeleton: Skeleton, seed: int | None) -> None:
        for part in self.guard.parts(self):
            skeleton.copy_of(part)._generator = part.generator
        if seed is not None:
            skeleton.module.reseed_(seed)

    @contextmanager
    def _under_lock(self, seed: int | None) -> Iterator[None]:
        """What `snapshot` is where there can be no copy: modes and generators come back afterwards."""
        with self.guard.exclusive(self):
            parts = self.all_posteriors()
            generators, modes = [part._generator for part in parts], [(m, m.training) for m in self.modules()]
            if seed is not None:
                self.reseed_(seed)
            try:
                yield
            finally:
                for part, generator in zip(parts, generators, strict=True):
                    part._generator = generator
                for module, training in modes:
                    module.training = training

    def frozen_copy(self) -> Self:
        """A copy for predictions, which does not change when training goes on, and may be used by several threads.

        Cheaper than `copy.deepcopy`: optimiser states are not copied.
        """
        with self.guard.exclusive(self):
            skeleton = self.guard.take(self, "all")
            if skeleton is None:
                return copy.deepcopy(self)
            for part in self.all_posteriors():
                twin = skeleton.copy_of(part)
                twin.guard = Guard()
                twin.guard.is_watched = False  # its first pass is watched for what it reads of the original
                twin._generator = torch.Generator(part.device).manual_seed(part.seed)
        frozen: Self = skeleton.module
        return frozen

    def all_posteriors(self) -> list[Posterior]:
        """This posterior and those that it is made of."""
        return [module for module in self.modules() if isinstance(module, Posterior)]

    def owns(self, net: nn.Module) -> bool:
        """Whether this is the posterior's network, or the private copy that a step hands to the loss."""
        parts = self.guard.parts(self)
        return any(net is part.model or part.guard.is_training_copy(net) for part in parts)

    @property
    def _net(self) -> nn.Module:
        """The network as training passes see it: a private copy of its modules with its own tensors."""
        return self.guard.training_network(self.model)

    @contextmanager
    def sampled(self, draw: Draw | None = None) -> Iterator[nn.Module]:
        """A private copy of the network with one draw in it (a fresh one unless given), for any use inside.

        Use the network that this yields: the posterior's own `model` stays at the mean. Gradients reach the posterior's
        parameters unless they are switched off, and passes in train mode update its running statistics.
        """
        trains = any(module.training for module in self.model.modules())
        copies = "parameters" if trains else "trained"
        with self.snapshot(copies=copies) as copy, copy.sampled_in_place(draw) as net:
            yield net

    @contextmanager
    def sampled_in_place(self, draw: Draw | None = None) -> Iterator[nn.Module]:
        """The network itself with one draw in the place of its weights; undone on exit. Not for several threads."""
        weights = self.draw() if draw is None else draw
        own = self.guard.holding(not self.guard.is_private)
        with substituted(self.model, weights, self._aliases), self.noise(), own:
            yield self.model

    @contextmanager
    def _with_draw(self, weights: Draw, in_place: bool) -> Iterator[nn.Module]:
        """The network that a training pass runs on with these weights; the user's own one if `in_place`."""
        net = self.model if in_place else self._net
        unread, held = self._means_unread(weights, in_place), self.guard.holding(in_place)
        with unread, substituted(net, weights, self._aliases), held:
            yield net

    @contextmanager
    def _means_unread(self, weights: Iterable[str], in_place: bool = False) -> Iterator[None]:
        """Raises NotIsolatedError if a pass inside gives the network's own parameters a gradient instead of the draw's.

        So a loss that also calls the module itself is run again, with the draw in the module.
        """
        if in_place or not self.guard.is_isolated or self.guard.is_private:
            yield
            return
        own = [*parameters_at(self.model, weights).values()]
        before = [(p.grad, None if p.grad is None else p.grad._version) for p in own]
        yield
        for parameter, (gradient, version) in zip(own, before, strict=True):
            now = parameter.grad
            if now is not gradient or (now is not None and now._version != version):
                parameter.grad = gradient if now is not gradient else None
                raise NotIsolatedError

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """One stochastic pass."""
        with self.sampled() as net:
            return net(*inputs, **options)

    @abstractmethod
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

    def _stepped(self, terms: Terms) -> Terms:
        """Count a step that is done, and warn if training has diverged; the same terms."""
        self.steps += 1
        # Autocast keeps casts of parameters until its region ends: a loop inside of one would train on old weights.
        torch.clear_autocast_cache()
        self._watch.after_step(terms.nll, self)
        return terms

    @contextmanager
    def prepared(
        self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None
    ) -> Iterator[Callable[[], Terms]]:
        """A step up to its first change: what may fail is done on entry, and what it yields makes the update.

        Left by an error without that, all is as before: so several posteriors step together or not at all. A method
        that does not split its step has nothing done on entry, and the whole of it in the update.
        """
        yield partial(self.step, nll, **Counted(examples, weights).given())

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


def _checked_once(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which raises at a posterior's first step if that must not be made as things are."""

    @wraps(method)
    def checked(self: Posterior, *args: Any, **options: Any) -> Any:
        if not self._may_step:
            check_alone(self)
            self._may_step = True
        return method(self, *args, **options)

    return checked


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
