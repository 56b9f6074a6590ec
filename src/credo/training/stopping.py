"""Ending a training early without losing anything: asked by a signal, done after the step that is running."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from credo.core.errors import CredoError

# Seconds after which a second Ctrl-C means "now": torchrun passes on the one that its processes got already.
_IMPATIENT = 1.0


class TrainingStopped(CredoError):  # noqa: N818 - nothing is wrong
    """Training ended early because it was asked to; the same call goes on from the checkpoint.

    `signal` is the number of the signal that asked, None if it was something else or another process got it.
    """

    def __init__(self, message: str, signal: int | None = None) -> None:
        super().__init__(message)
        self.signal = signal


class StopRequest:
    """Whether training was asked to end; called, it says so, as `stop=` of `credo.train` wants it."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since: float | None = None

    def ask(self, signal: int | None = None) -> None:
        """End training after the step that is running."""
        if self._since is None:
            self.signal, self._since = signal, time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since training was first asked to end."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def __call__(self) -> bool:
        """Whether training was asked to end."""
        return self._since is not None


@contextmanager
def stopping_on_signals(signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT)) -> Iterator[StopRequest]:
    """While open, these signals only ask to stop: give what it yields to `credo.train` as `stop=`.

    Training then ends after its step with a checkpoint and `TrainingStopped`. A second Ctrl-C, a second or more after
    the first, interrupts at once. The handlers from before come back at the end; outside of the main thread, where
    Python takes no signals, nothing is changed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and request.age >= _IMPATIENT:
            raise KeyboardInterrupt
        request.ask(number)

    before = {number: signal.signal(number, ask) for number in signals}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
