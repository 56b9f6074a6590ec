"""Stop training early with a checkpoint, on a signal or on request."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from credo.core.errors import CredoError

# Seconds after which a second Ctrl-C interrupts at once: torchrun forwards the first one to its processes again.
_IMPATIENT = 1.0


class TrainingStopped(CredoError):  # noqa: N818 - nothing is wrong
    """Training stopped early on request; the same call resumes from the checkpoint.

    Args:
        message: What was asked and saved.
        signal: Number of the signal, None if there was none or another process got it.
    """

    def __init__(self, message: str, signal: int | None = None) -> None:
        super().__init__(message)
        self.signal = signal


class StopRequest:
    """A request to stop training; callable, for `stop=` of `credo.train`."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since: float | None = None

    def ask(self, signal: int | None = None) -> None:
        """Stop training after the current step."""
        if self._since is None:
            self.signal, self._since = signal, time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since the first request."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def __call__(self) -> bool:
        """Return whether training was asked to stop."""
        return self._since is not None


@contextmanager
def stopping_on_signals(signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT)) -> Iterator[StopRequest]:
    """Turn signals into a stop request inside the block; pass what it yields to `credo.train` as `stop=`.

    Training then writes a checkpoint after the current step and raises `TrainingStopped`. A second Ctrl-C, at least a
    second after the first, interrupts at once. The old handlers are restored at the end. Outside the main thread, where
    Python cannot handle signals, nothing changes.

    Args:
        signals: By default SIGTERM, which clusters send before they take a machine back, and Ctrl-C.
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
