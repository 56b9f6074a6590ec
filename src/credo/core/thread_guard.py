"""What keeps threads apart that use one posterior: a lock for what changes it, and private copies for the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import nn

from credo.core.network.isolation import NotIsolatedError
from credo.core.network.references import NotFollowed
from credo.core.network.skeleton import UNCOPYABLE, ChangedStructureError, Skeleton

if TYPE_CHECKING:
    from credo.core.posterior import Posterior

_MOST_COPIES = 16


class FairLock:
    """A lock that its owner may take again, and that others get in between: a training loop cannot keep it for itself.

    Python's own locks let a thread that releases and takes one in a row starve all who wait.
    """

    def __init__(self) -> None:
        self._turn, self._lock = threading.Lock(), threading.RLock()
        self._owner: int | None = None
        self.depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._lock.acquire()
        else:
            with self._turn:
                self._lock.acquire()
            self._owner = me
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
        self.holds_draw = False  # the network itself has a draw in the place of its weights, for `credo.optim`
        self.is_watched = True  # no pass has shown yet that a copy of the network is on its own
        self._free: list[Skeleton] = []
        self._training: Skeleton | None = None
        self._is_stale = True
        self._parts: list[Posterior] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        return Guard()

    def __reduce__(self) -> tuple[Any, ...]:
        return Guard, ()

    # -- private copies for prediction ----------------------------------------------------------------------------

    def take(self, posterior: Posterior, copies: str) -> Skeleton | None:
        """A copy of the posterior that is up to date, or None if there cannot be one. To be called under the lock."""
        while self.is_isolated:
            try:
                parts = self.parts(posterior)
                skeleton = self._free.pop() if self._free else self._new(posterior, posterior.model, parts)
                skeleton.refresh(copies)
                return skeleton
            except ChangedStructureError:
                self._free.clear()
            except UNCOPYABLE:
                self.is_isolated = False
        return None

    def give_back(self, skeleton: Skeleton, copies: str) -> None:
        """Keep a copy for whoever comes next."""
        self.is_watched = self.is_watched and not skeleton.is_verified
        if copies != "none":
            skeleton.share()
        if len(self._free) < _MOST_COPIES:
            self._free.append(skeleton)

    def _new(self, source: nn.Module, network: nn.Module, parts: Sequence[Posterior] = ()) -> Skeleton:
        own = {id(part.guard): Guard(private=True) for part in parts}
        return Skeleton(source, network, watched=self.is_watched, replaced=own)

    # -- the copy for training ------------------------------------------------------------------------------------

    def training_network(self, model: nn.Module) -> nn.Module:
        """The copy of the network that training passes run on; the network itself where there can be none."""
        if not self._is_stale or not self.is_isolated or self.is_private:
            return model if self._training is None or not self.is_isolated else self._training.module
        try:
            if self._training is None:
                self._training = self._new(model, model)
            self._training.refresh()
        except ChangedStructureError:
            self._training = None
            return self.training_network(model)
        except UNCOPYABLE:
            self.is_isolated = False
            return model
        self._is_stale = False
        return self._training.module  # type: ignore[no-any-return]

    def is_training_copy(self, net: nn.Module) -> bool:
        """Whether training passes run on this module."""
        return self._training is not None and net is self._training.module

    def began(self) -> None:
        """A step begins: modes and attributes of the network may have changed since the last one."""
        self._is_stale = True

    def ended(self) -> None:
        """A step has ended: what its passes assigned to the network belongs to the original."""
        if self._training is not None and not self._is_stale:
            self.is_watched = self.is_watched and not self._training.is_verified
            self._training.write_back()
        self._is_stale = True

    def check_used(self, is_used: bool) -> None:
        """Raise NotIsolatedError if a loss did not use the copy of the network that it was given."""
        if self.is_isolated and not self.is_private and not is_used:
            raise NotIsolatedError

    @contextmanager
    def holding(self, in_place: bool) -> Iterator[None]:
        """While open, draws and steps are an error if the network itself holds a draw: it is no mean then."""
        before, self.holds_draw = self.holds_draw, in_place
        try:
            yield
        finally:
            self.holds_draw = before

    def parts(self, posterior: Posterior) -> list[Posterior]:
        """The posterior and those that it is made of."""
        if self._parts is None:
            self._parts = posterior.all_posteriors()
        return self._parts

    def exclusive(self, posterior: Posterior) -> AbstractContextManager[None]:
        """While open, no other thread changes the posterior or takes a copy of it.

        Raises RuntimeError if the network itself holds a draw that this very thread has put there.
        """
        guards = {id(part.guard): part.guard for part in self.parts(posterior)}
        return _exclusive(
            [guards[key] for key in sorted(guards)]
        )  # in one order for all: two can't wait for each other


@contextmanager
def _exclusive(guards: list[Guard]) -> Iterator[None]:
    with ExitStack() as stack:
        for guard in guards:
            stack.enter_context(guard.lock)
            if guard.holds_draw:  # with the lock, so it is this thread's
                raise RuntimeError("A draw is in the network's place already: trials, steps and draws do not nest.")
            if guard.lock.depth == 1:
                guard.began()
                stack.callback(guard.ended)
        yield


def exclusively(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a posterior that nobody else may disturb; run again if it finds that the network is not isolated."""

    @wraps(method)
    def locked(self: Posterior, *args: Any, **options: Any) -> Any:
        guard = self.guard
        if guard.is_private:
            return method(self, *args, **options)
        with guard.exclusive(self):
            if guard.lock.depth > 1 or not guard.is_isolated:
                return method(self, *args, **options)
            posteriors = guard.parts(self)
            states = [part.generator.get_state() for part in posteriors]
            try:
                return method(self, *args, **options)
            except NotIsolatedError:
                for part, state in zip(posteriors, states, strict=True):
                    part.guard.is_isolated = False
                    part.generator.set_state(state)
            return method(self, *args, **options)

    return locked


def exclusive_context(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a method that is a context manager, which cannot be run again."""

    @wraps(method)
    @contextmanager
    def locked(self: Posterior, *args: Any, **options: Any) -> Iterator[Any]:
        alone = nullcontext() if self.guard.is_private else self.guard.exclusive(self)
        with alone, method(self, *args, **options) as value:
            yield value

    return locked
