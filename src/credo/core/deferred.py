"""Numbers that are read later, and checks of several steps at once, so that a step never waits for an accelerator.

Reading a number from an accelerator waits for all work queued on it. There, losses stay tensors until they are read,
and every `EVERY` steps all losses and the weights are checked. If something was not finite, the
posterior returns to a copy that was kept at the last check.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from credo.core.errors import NonFiniteError, unknown
from credo.core.network.references import NotFollowed

if TYPE_CHECKING:
    from credo.core.posterior import Posterior

EVERY = 32
CHOICES = ("immediate", "deferred")


class Later:
    """A number that is computed when it is read, once; sums and products with others are such numbers, too.

    Args:
        value: A tensor of one entry, or a function without arguments.
    """

    def __init__(self, value: Tensor | Callable[[], float]) -> None:
        self._value: Tensor | Callable[[], float] | float = value

    def __float__(self) -> float:
        value = self._value
        if not isinstance(value, float):
            self._value = value = float(value.item() if isinstance(value, Tensor) else value())
        return value

    def __add__(self, other: Number) -> Later:
        return Later(lambda: float(self) + float(other))

    def __mul__(self, other: Number) -> Later:
        return Later(lambda: float(self) * float(other))

    def __sub__(self, other: Number) -> Later:
        return Later(lambda: float(self) - float(other))

    def __truediv__(self, other: Number) -> Later:
        return Later(lambda: float(self) / float(other))

    __radd__, __rmul__ = __add__, __mul__


Number = float | Later


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


class _Read:
    """A field of terms that may be given as a number to be read later, and is then read when somebody looks."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, terms: Any, owner: type | None = None) -> Any:
        value = vars(terms)[self.name]
        return float(value) if isinstance(value, Later) else value

    def __set__(self, terms: Any, value: Any) -> None:
        vars(terms)[self.name] = value


class LaterTerms(Terms):
    """Terms of a step without waiting for the device: each is read when it is first used."""

    loss = _Read()
    nll = _Read()
    penalty = _Read()
    kl = _Read()


def are_deferred(device: torch.device) -> bool:
    """Whether checks wait: on accelerators, or as `CREDO_CHECKS` says. Raises ValueError if that is unknown."""
    choice = os.environ.get("CREDO_CHECKS")
    if choice is not None and choice not in CHOICES:
        raise ValueError(unknown("CREDO_CHECKS", choice, CHOICES))
    return device.type != "cpu" if choice is None else choice == "deferred"


class DeferredChecks(NotFollowed):
    """The steps of a posterior that were not checked yet, and a copy of its state before the first of them."""

    def __init__(self) -> None:
        self.is_open = False  # the checks of the current step wait
        self.waiting: list[tuple[int, Terms]] = []  # steps to be checked
        self._kept: dict[str, Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredChecks:
        return DeferredChecks()

    def __reduce__(self) -> tuple[Any, ...]:
        return DeferredChecks, ()

    def begin(self, posterior: Posterior) -> None:
        """Before a step: decide whether its checks are deferred; for the first that are, keep a copy of the state."""
        self.is_open = posterior.process_group is None and are_deferred(posterior.device)
        if not self.is_open:
            self.settle(posterior)
        elif self._kept is None:
            self._kept = copy.deepcopy(posterior.state_dict())
            self._first = posterior.steps

    def add(self, posterior: Posterior, terms: Terms) -> None:
        """After a step: check all that wait if there are enough of them."""
        self.waiting.append((posterior.steps - 1, terms))
        if len(self.waiting) >= EVERY:
            self.settle(posterior)

    def settle(self, posterior: Posterior) -> None:
        """Check all that wait. Raises NonFiniteError with the first step that failed; the copy is restored before."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        kept, self._kept = self._kept, None
        bad = next(((step, terms.loss) for step, terms in waiting if not math.isfinite(terms.loss)), None)
        if bad is None and _are_finite([*posterior.parameters()]):
            for _, terms in waiting:
                posterior._watch_loss(terms.nll)
            return
        assert kept is not None
        posterior.load_state_dict(kept)
        what = f"loss is {bad[1]} at step {bad[0]}" if bad else f"update of step {waiting[-1][0]} is not finite"
        raise NonFiniteError(
            f"The {what}, of its batch or by the update before. Checks were deferred, so the posterior was set back to "
            f"its state before step {self._first}. Try a smaller lr, or check the inputs of this batch; with "
            "CREDO_CHECKS=immediate in the environment every step is checked before it changes anything."
        )


def _are_finite(tensors: list[Tensor]) -> bool:
    largest = torch._foreach_norm([t.detach() for t in tensors if t.numel()], math.inf)
    return not largest or bool(torch.stack([norm.to(largest[0]) for norm in largest]).isfinite().all())
