"""Timings and long trainings take turns on one machine: the queue pauses while a benchmark measures.

Both use lock files in the user's cache folder, so that checkouts in different folders see each other. The system frees
the lock of a process that ends in any way.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from credo.cli.output import say
from credo.core.errors import CredoError
from credo.core.support.files import cache_home

POLL = 0.5  # seconds between two looks at the lock of the benchmarks
# Nobody sends this signal; Windows has no user signals, and its SIGBREAK comes from a key that hardly exists.
_PAUSE = getattr(signal, "SIGUSR1", None) or signal.Signals["SIGBREAK"]


@contextmanager
def timing(*, quick: bool = False) -> Iterator[None]:
    """Have the machine for a benchmark: wait until no other one measures and the queue, if one runs, has paused.

    Args:
        quick: Do nothing; the numbers of a trial run mean nothing.
    """
    if quick:
        yield
        return
    if benchmark_runs():
        say("waiting until another benchmark has finished …")
    with _lock("benchmark", blocking=True):
        if queue_runs():
            say("waiting until the queue of the reproductions has paused …")
            time.sleep(2 * POLL + 1)
        yield


@contextmanager
def only_queue() -> Iterator[None]:
    """Be the only queue of this user on this machine.

    Raises:
        CredoError: if there is another.
    """
    try:
        with _lock("queue", blocking=False):
            yield
    except Timeout as error:
        raise CredoError(
            "Another queue is running on this machine, and two would take each other's time: see "
            "`python -m reproductions queue status`, and wait for it or stop it."
        ) from error


def queue_runs() -> bool:
    """Whether a queue of this user runs or is paused."""
    return _is_held("queue")


def benchmark_runs() -> bool:
    """Whether a benchmark of this user measures."""
    return _is_held("benchmark")


@contextmanager
def paused_while(true: Callable[[], bool], tell: Callable[[bool], None], *, poll: float = POLL) -> Iterator[None]:
    """Stop the main thread, between two of its operations, for as long as a condition holds.

    A thread watches the condition, and simulates a signal when it becomes true. Python runs the handler of a signal in
    the main thread before its next instruction, and the handler waits: nothing is lost, and nothing is computed.

    Args:
        true: The condition.
        tell: Called with True when the pause begins and with False when it ends, in the main thread.
        poll: Seconds between two looks.
    """
    ended, waiting = threading.Event(), threading.Event()

    def wait(number: int, frame: object) -> None:
        if ended.is_set() or waiting.is_set() or not true():
            return
        waiting.set()
        try:
            tell(True)
            while true():
                time.sleep(poll)
            tell(False)
        except BaseException:  # such as Ctrl-C: no second pause while the first one's error ends the program
            ended.set()
            raise
        finally:
            waiting.clear()

    def watch() -> None:
        while not ended.wait(poll):
            if not waiting.is_set() and true():
                _thread.interrupt_main(_PAUSE)

    before = signal.signal(_PAUSE, wait)
    watcher = threading.Thread(target=watch, daemon=True)
    try:
        watcher.start()  # here, since a slow start may already be interrupted by what it watches for
        wait(_PAUSE, None)
        yield
    finally:
        ended.set()
        watcher.join()
        signal.signal(_PAUSE, before)


def _lock(name: str, *, blocking: bool) -> FileLock:
    folder = cache_home() / "credo"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{name}.lock", blocking=blocking, preserve_lock_file=True)


def _is_held(name: str) -> bool:
    try:
        with _lock(name, blocking=False):
            return False
    except Timeout:
        return True
