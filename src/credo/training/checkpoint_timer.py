"""Decide after each step whether to write a checkpoint or to stop; all ranks decide alike."""

from __future__ import annotations

import time
from collections.abc import Callable

from credo.core.distributed.process_group import ProcessGroup
from credo.core.support.validate import checked_count
from credo.training.rank_zero import from_first, several

# All ranks check clock and signals together about once a second of training, at least every hundred steps.
_SECONDS, _MOST_STEPS = 1.0, 100


class CheckpointTimer:
    """Tells after each step whether a checkpoint is due and whether to stop.

    Steps are counted by every rank; rank 0's clock decides about minutes; a stop request to one rank stops all.

    Args:
        process_group: The processes that train together, or None.
        every: Steps between two checkpoints, or None.
        minutes: Minutes between two checkpoints, or None.
        stop: Returns whether training was asked to stop.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None,
        *,
        every: int | None,
        minutes: float | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        if every is not None:
            checked_count("checkpoint_every", every, what="steps between two checkpoints")
        if minutes is not None and not minutes > 0:
            raise ValueError(f"checkpoint_minutes={minutes} must be positive, or None for no checkpoints by time.")
        self.process_group, self.every, self.minutes, self.stop = process_group, every, minutes, stop
        self._saved = self._looked = time.monotonic()
        self._wait = self._left = 1  # steps between two checks, and until the next

    def saved(self) -> None:
        """Restart the clock after a checkpoint was written."""
        self._saved = time.monotonic()

    def after(self, steps: int) -> tuple[bool, bool]:
        """Return (save, stop) after `steps` steps in total."""
        counted = self.every is not None and steps % self.every == 0
        due, stop = self._look()
        return counted or due, stop

    def _look(self) -> tuple[bool, bool]:
        due = self.minutes is not None and time.monotonic() - self._saved >= 60 * self.minutes
        stop = self.stop is not None and self.stop()
        if self.process_group is None or not several(self.process_group):
            return due, stop
        self._left -= 1
        if self._left > 0:
            return False, False
        stop = self.process_group.agree(stop)
        due, self._wait = from_first(self.process_group, (due, self._steps_until_next()))
        self._left = self._wait
        return due, stop

    def _steps_until_next(self) -> int:
        now = time.monotonic()
        step = (now - self._looked) / self._wait
        self._looked = now
        return max(1, min(_MOST_STEPS, int(_SECONDS / max(step, 1e-6))))
