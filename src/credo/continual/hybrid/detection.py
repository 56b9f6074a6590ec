"""Which task a batch belongs to, by the typicality of three statistics under each task.

The statistics of a batch under a task (mean log-likelihood, its latent part, its log-determinant) are compared with
a line through their values at the last batches of that task, in units of the standard deviation around that line: they
move as the flow learns, and a plain standard deviation would take that for noise and miss a change. The test is
two-sided: a likelihood that is too high is as unusual as one that is too low (Nalisnick et al. 2019; several
statistics: Morningstar et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.core.support.validate import checked_count

STAY, HOLD, NEW, SWITCH = "stay", "hold", "new", "switch"


@dataclass(frozen=True)
class Decision:
    """Which task a batch was taken to be of.

    Attributes:
        kind: `"stay"`: of the current task. `"hold"`: not typical, and too few such batches in a row to decide.
            `"new"`: of a task never seen. `"switch"`: of another known task.
        task: Index of the task of the batch; for `"hold"` the current one.
        statistics: The three statistics under that task; None for `"new"`.
    """

    kind: str
    task: int
    statistics: tuple[float, ...] | None = None


class TaskDetector:
    """Finds changes of task in a stream of batches.

    Args:
        window: Last batches of a task to which lines are fitted.
        threshold: Largest distance from the line, in standard deviations, of a typical batch.
        known_threshold: The same for tasks other than the current one, whose statistics have moved since they were last
            seen; None: `threshold`.
        consecutive: Untypical batches in a row that end a task. They are not learned.
        burn_in: First batches of a task, and first ones after a return to it, that are taken as they come: a change of
            task within them is not found.
    """

    def __init__(
        self,
        *,
        window: int = 100,
        threshold: float = 5.0,
        known_threshold: float | None = None,
        consecutive: int = 2,
        burn_in: int = 30,
    ) -> None:
        self.window = checked_count("window", window, least=3, what="batches")
        self.consecutive = checked_count("consecutive", consecutive, what="batches")
        self.burn_in = checked_count("burn_in", burn_in, least=3, what="batches")
        self.known_threshold = threshold if known_threshold is None else known_threshold
        if not threshold > 0 or not self.known_threshold > 0:
            raise ValueError(f"threshold={threshold} and known_threshold={known_threshold} must be positive.")
        self.threshold = threshold
        self.windows: list[Tensor] = []  # of each task: [batches, 3], oldest first
        self.current, self.since_change, self.held = -1, 0, 0

    def decide(self, statistics: Callable[[int], Tensor], drift: Callable[[int], Tensor] | None = None) -> Decision:
        """The task of a batch, whose `statistics(task)` are its three under a task; changes the detector's state.

        Args:
            statistics: Statistics of the batch under a task.
            drift: How far a task's statistics have moved since its window was recorded, as far as this is known.
        """
        if self.current < 0:
            return self._changed(NEW, 0)
        own = statistics(self.current).double().cpu()
        if self.since_change < self.burn_in or self._is_typical(own, self.current, self.threshold, None):
            return self._stayed(own)
        self.held += 1
        if self.held < self.consecutive:
            return Decision(HOLD, self.current, tuple(own.tolist()))
        for task in self._others():
            found = statistics(task).double().cpu()
            moved = None if drift is None else drift(task).double().cpu()
            if self._is_typical(found, task, self.known_threshold, moved):
                return self._changed(SWITCH, task, found)
        return self._changed(NEW, len(self.windows))

    def moved_(self, task: int, by: Tensor) -> None:
        """Move the recorded statistics of a `task`, since the flow has changed."""
        self.windows[task] = self.windows[task] + by.double().cpu()

    def moments(self, task: int) -> tuple[Tensor, Tensor]:
        """Expected statistics of a task's next batch, and the standard deviation around the line that says so.

        The line is the one of least squares over the window of the task.
        """
        values = self.windows[task]
        batches = torch.arange(len(values), dtype=torch.float64)
        centred = batches - batches.mean()
        trend = (centred[:, None] * values).sum(0) / centred.pow(2).sum()
        residuals = values - values.mean(0) - centred[:, None] * trend
        std = (residuals.pow(2).sum(0) / (len(values) - 2)).sqrt()
        return values.mean(0) + trend * (len(values) - batches.mean()), std

    def _is_typical(self, found: Tensor, task: int, threshold: float, moved: Tensor | None) -> bool:
        if len(self.windows[task]) < 3:
            return False
        mean, std = self.moments(task)
        expected = mean if moved is None else mean + moved
        return bool(((found - expected).abs() <= threshold * std).all())  # False for NaN

    def _others(self) -> list[int]:
        return [task for task in range(len(self.windows)) if task != self.current]

    def _stayed(self, found: Tensor) -> Decision:
        self.held, self.since_change = 0, self.since_change + 1
        self.windows[self.current] = torch.cat([self.windows[self.current], found[None]])[-self.window :]
        return Decision(STAY, self.current, tuple(found.tolist()))

    def _changed(self, kind: str, task: int, found: Tensor | None = None) -> Decision:
        # Statistics change fast at first: a task's window starts with the batches after this one. That of a known task
        # starts again, since the flow is no longer what it was.
        if kind == NEW:
            self.windows.append(torch.zeros(0, 3, dtype=torch.float64))
        else:
            self.windows[task] = torch.zeros(0, 3, dtype=torch.float64)
        self.current, self.since_change, self.held = task, 0, 0
        return Decision(kind, task, None if found is None else tuple(found.tolist()))

    def state(self) -> dict[str, object]:
        """Everything that `decide` changed, for checkpoints."""
        return {
            "windows": list(self.windows), "current": self.current, "since_change": self.since_change, "held": self.held
        }  # fmt: skip

    def load_state(self, state: dict[str, object]) -> None:
        """Resume from `state()`."""
        for name, value in state.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)
