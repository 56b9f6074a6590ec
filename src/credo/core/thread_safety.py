"""Several threads may use one posterior: a lock for what changes it, and its private copies (`credo.core.sampling`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from credo.core.deferred import DeferredChecks, LaterTerms, Terms
from credo.core.distributed.wrapped_networks import check_alone, check_unwrapped
from credo.core.divergence import TrainingWatch
from credo.core.example_counts import not_a_loss
from credo.core.loss_reduction import reduction_watched
from credo.core.network.isolation import NotIsolatedError
from credo.core.network.references import NotFollowed
from credo.core.network.skeleton import UNCOPYABLE, ChangedStructureError, Skeleton
from credo.core.network.substitute import NOTHING
from credo.core.support.validate import checked_seed

if TYPE_CHECKING:
    from credo.core.posterior import Posterior

_MOST_COPIES = 16
# Methods that change a posterior or read what a step changes: every implementation of them holds the lock.
_EXCLUSIVE = ("step", "gather", "update", "draw", "keep_")
_EXCLUSIVE_CONTEXTS = ("prepared", "trial")
# Of these, those after which the weights are others.
_CHANGING = ("step", "update", "keep_")


class FairLock:
    """A reentrant lock with a queue: a training loop that releases and retakes it cannot starve the threads that wait.

    Python's own locks let a thread that releases and takes one in a row starve all who wait.
    """

    def __init__(self) -> None:
        self._turn, self._lock = threading.Lock(), threading.RLock()
        self._owner: int | None = None
        self.depth = 0

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            self._lock.acquire()
        else:
            with self._turn:
                self._lock.acquire()
            self._owner = threading.get_ident()
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if not self.depth:
            self._owner = None
        self._lock.release()


class Guard(NotFollowed):
    """The lock of a posterior and the private copies that nobody uses at the moment; copies of it get a new one.

    `is_private` marks a copy that belongs to one thread: it is used as it is. `is_isolated` is False once the network
    has turned out to read its weights past its private copies, or cannot be copied.
    """

    def __init__(self, *, private: bool = False) -> None:
        self.lock = FairLock()
        self.is_private, self.is_isolated = private, True
        self.is_fixed = False  # nobody changes the posterior any more, so that copies of it stay up to date
        self.holds_draw = False  # the network itself has a draw in the place of its weights, for `credo.optim`
        self.checked_for = 0  # the number of processes at the last check of whether a step may be made
        self.trusted: set[bool] = set()  # modes in which a pass has shown that a copy of the network is on its own
        self.compiles = False  # training passes run the network's `forward` through torch.compile
        self._refreshes = 0
        self._compiled: tuple[nn.Module, Callable[..., Any]] | None = None
        self._free: list[Skeleton] = []
        self._training: Skeleton | None = None
        self._is_stale = True
        self._parts: list[Posterior] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        new = Guard()
        new.compiles = self.compiles
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return Guard, ()

    # -- private copies for prediction ----------------------------------------------------------------------------

    def take(self, posterior: Posterior, copies: str, training: bool | None = None) -> Skeleton | None:
        """A copy of the posterior that is up to date, or None if there cannot be one. To be called under the lock."""
        while self.is_isolated:
            try:
                parts = self.parts(posterior)
                is_known = bool(self._free)
                skeleton = self._free.pop() if is_known else self._new(posterior, posterior.model, parts)
                skeleton.refresh(copies, training=training, is_fixed=self.is_fixed and is_known)
                return skeleton
            except ChangedStructureError:
                self._free.clear()
            except UNCOPYABLE:
                self.is_isolated = False
        return None

    def give_back(self, skeleton: Skeleton, copies: str) -> None:
        """Keep a copy for whoever comes next."""
        if copies != "none":
            skeleton.share()
        if len(self._free) < _MOST_COPIES:
            self._free.append(skeleton)

    def _new(self, source: nn.Module, network: nn.Module, parts: Sequence[Posterior] = ()) -> Skeleton:
        check_unwrapped(source)
        own = {id(part.guard): Guard(private=True) for part in parts}
        return Skeleton(source, network, trusted=self.trusted, replaced=own)

    # -- the copy for training ------------------------------------------------------------------------------------

    def training_network(self, model: nn.Module) -> nn.Module:
        """The copy of the network that training passes run on; the network itself where there can be none."""
        if not self._is_stale or not self.is_isolated or self.is_private:
            return model if self._training is None or not self.is_isolated else self._training.module
        try:
            if self._training is None or not self._training.is_of(model):
                self._training = self._new(model, model)
            self._training.refresh(training=model.training)
        except ChangedStructureError:
            self._training = None
            return self.training_network(model)
        except UNCOPYABLE:
            self.is_isolated = False
            return model
        self._is_stale = False
        network: nn.Module = self._training.module
        self._refreshes += 1
        if self.compiles and self._refreshes > 1:  # the first pass may be watched, which torch.compile cannot see
            self._compile(network)
        return network

    def _compile(self, network: nn.Module) -> None:
        """Let a copy run its `forward` compiled, with whatever weights are in it: hooks around it stay as they are."""
        if self._compiled is None or self._compiled[0] is not network:
            self._compiled = network, torch.compile(network.forward)
        network.__dict__["forward"] = self._compiled[1]

    def is_training_copy(self, net: nn.Module) -> bool:
        """Whether training passes run on this module."""
        return self._training is not None and net is self._training.module

    def began(self) -> None:
        """A step begins: modes and attributes of the network may have changed since the last one."""
        self._is_stale = True

    def ended(self) -> None:
        """A step has ended: what its passes assigned to the network belongs to the original."""
        if self._training is not None and not self._is_stale:
            self._training.write_back()
        self._is_stale = True

    def check_used(self, is_used: bool) -> None:
        """Raise NotIsolatedError if a loss did not use the copy of the network that it was given."""
        if self.is_isolated and not self.is_private and not is_used:
            raise NotIsolatedError

    @contextmanager
    def holding(self, noise: AbstractContextManager[Any] = NOTHING) -> Iterator[None]:
        """While open, so is `noise`, and draws and steps raise RuntimeError: the network itself holds a draw."""
        before, self.holds_draw = self.holds_draw, True
        try:
            with noise:
                yield
        finally:
            self.holds_draw = before

    def parts(self, posterior: Posterior) -> list[Posterior]:
        """The posterior and those that it is made of."""
        if self._parts is None:
            self._parts = posterior.all_posteriors()
        return self._parts

    def exclusive(self, posterior: Posterior) -> AbstractContextManager[Any]:
        """While open, no other thread changes the posterior or takes a copy of it.

        Raises RuntimeError if the network itself holds a draw that this very thread has put there.
        """
        guards = {id(part.guard): part.guard for part in self.parts(posterior)}
        if len(guards) == 1:
            return guards.popitem()[1]
        return _all_of([guard for _, guard in sorted(guards.items())])  # in one order: two can't wait for each other

    def __enter__(self) -> None:
        self.lock.__enter__()
        try:
            self.check_free()
        except BaseException:
            self.lock.__exit__()
            raise
        if self.lock.depth == 1:
            self.began()

    def __exit__(self, *error: object) -> None:
        try:
            if self.lock.depth == 1:
                self.ended()
        finally:
            self.lock.__exit__()

    def check_free(self) -> None:
        """Raise RuntimeError if the network holds a draw; to be called with the lock, so it is this thread's."""
        if self.holds_draw:
            raise RuntimeError(
                "Sampled weights are currently loaded in the network: trials, steps and draws do not nest. Leave the "
                "`trial()` or `sampled_params` block first."
            )


@contextmanager
def _all_of(guards: Sequence[Guard]) -> Iterator[None]:
    with ExitStack() as stack:
        for guard in guards:
            stack.enter_context(guard)
        yield


def exclusively(method: Callable[..., Any]) -> Callable[..., Any]:
    """Hold the lock during a method of a posterior; run it again, in place, if the network turns out not isolated."""

    @wraps(method)
    def locked(self: Posterior, *args: Any, **options: Any) -> Any:
        guard = self.guard
        if guard.is_private:
            return method(self, *args, **options)
        if guard.lock.is_mine:  # part of a step, or of an ensemble's
            guard.check_free()
            return method(self, *args, **options)
        with guard.exclusive(self):
            if not guard.is_isolated:
                return method(self, *args, **options)
            posteriors = guard.parts(self)
            generators = [(part._generator, part._generator.get_state()) for part in posteriors]
            try:
                return method(self, *args, **options)
            except NotIsolatedError:
                for part, (generator, state) in zip(posteriors, generators, strict=True):
                    part.guard.is_isolated = False
                    part._generator = generator.set_state(state)
            return method(self, *args, **options)

    return locked


def exclusive_context(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a method that is a context manager, which cannot be run again."""

    @contextmanager
    def alone(self: Posterior, *args: Any, **options: Any) -> Iterator[Any]:
        with self.guard.exclusive(self), method(self, *args, **options) as value:
            yield value

    @wraps(method)
    def locked(self: Posterior, *args: Any, **options: Any) -> Any:
        guard = self.guard
        if not guard.is_private and not guard.lock.is_mine:
            return alone(self, *args, **options)
        guard.check_free()
        return method(self, *args, **options)

    return locked


def checked_once(method: Callable[..., Any]) -> Callable[..., Any]:
    """Raise if a posterior must not be trained as things are: at first, and when the number of processes changes."""

    @wraps(method)
    def checked(self: Posterior, *args: Any, **options: Any) -> Any:
        if method.__name__ == "step" and args and not callable(args[0]):
            raise not_a_loss(args[0])
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if self.guard.checked_for != processes:
            check_alone(self)
            self.guard.checked_for = processes
            if self.steps == 0 and method.__name__ == "step":
                with reduction_watched(self):
                    return checked(self, *args, **options)
        may_defer = self.can_defer_checks and (self.device.type != "cpu" or "CREDO_CHECKS" in os.environ)
        may_defer = may_defer and self.loss_scale == 1  # which is to be halved at once where it overflows
        if not may_defer or method.__name__ != "step":
            return method(self, *args, **options)
        self._checks.begin(self)
        try:
            return method(self, *args, **options)
        finally:
            self._checks.is_open = False

    return checked


def changes_weights(method: Callable[..., Any]) -> Callable[..., Any]:
    """Drop the posterior's calibration, with a warning, once a method has changed its weights or their spread."""

    @wraps(method)
    def changing(self: Posterior, *args: Any, **options: Any) -> Any:
        result = method(self, *args, **options)
        if self._calibration is not None or self.conformal is not None:
            self._drop_calibration()
        return result

    return changing


class ThreadSafe(nn.Module):
    """What a posterior needs so that several threads may step it: the lock, its own generator, a copy to train on."""

    model: nn.Module
    seed: int
    steps: int
    lr_scale: float
    can_defer_checks: ClassVar[bool]
    can_compile: bool
    loss_scale: float
    _checks: DeferredChecks
    _watch: TrainingWatch
    _generator: torch.Generator

    def __init_subclass__(cls, **options: Any) -> None:
        """Every method, also one written elsewhere, steps with the lock held, and is checked before its first step."""
        super().__init_subclass__(**options)
        for name in (*_EXCLUSIVE, *_EXCLUSIVE_CONTEXTS):
            if name in cls.__dict__:
                method = cls.__dict__[name]
                method = changes_weights(method) if name in _CHANGING else method
                method = checked_once(method) if name in ("step", "gather", "trial") else method
                setattr(cls, name, (exclusive_context if name in _EXCLUSIVE_CONTEXTS else exclusively)(method))

    def __init__(self) -> None:
        super().__init__()
        self.guard = Guard()

    # -- random numbers -------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        modules: list[nn.Module | None] = [self.model]
        for module in modules:  # several times a step: `modules()` takes three times as long, `parameters()` ten times
            if module is None:
                continue
            for parameter in module._parameters.values():
                if parameter is not None:
                    return parameter.device
            modules += module._modules.values()
        return torch.device("cpu")

    @property
    def generator(self) -> torch.Generator:
        """The source of all of this posterior's randomness, on the network's device; a new one after it has moved."""
        there, here = self._generator.device, self.device
        if there != here and (there.type != here.type or (here.index or 0) != (there.index or 0)):
            self._generator = torch.Generator(here).manual_seed(self.seed)
        return self._generator

    def reseed_(self, seed: int) -> None:
        """Take random numbers from a new generator from here on."""
        self._generator = torch.Generator(self.device).manual_seed(checked_seed(seed))

    # -- the end of a step ----------------------------------------------------------------------------------------

    def _stepped(self, terms: Terms) -> Terms:
        """Count a step that is done, and warn if training has diverged; the same terms."""
        self.steps += 1
        # Autocast keeps casts of parameters until its region ends: a loop inside of one would train on old weights.
        torch.clear_autocast_cache()
        if self._checks.is_open:
            me: Any = self
            terms = LaterTerms(**vars(terms))
            self._checks.add(me, terms)
        else:
            self._watch_loss(terms.nll)
        return terms

    def _watch_loss(self, nll: float) -> None:
        if nll > self._watch.limit or self._watch.above:
            me: Any = self
            self._watch.after_step(nll, me)

    def lr_factor(self, step: int) -> float:
        """The factor on the learning rates in a step: `lr_scale`, unless the method has a reason to differ.

        Args:
            step: Number of steps before it.
        """
        return self.lr_scale

    # -- what a step works on -----------------------------------------------------------------------------------

    def all_posteriors(self) -> list[Posterior]:
        """This posterior and those that it is made of."""
        return [module for module in self.modules() if isinstance(module, ThreadSafe)]  # type: ignore[misc]

    @property
    def _net(self) -> nn.Module:
        """The network as training passes see it: a private copy of its modules with its own tensors."""
        return self.guard.training_network(self.model)
