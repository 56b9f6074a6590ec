"""Streams: batches of labelled examples, task after task, that do not tell where a task ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.core.support.validate import checked_count
from credo.data import Split


@dataclass(frozen=True)
class Segment:
    """Consecutive batches of one task: what the stream itself knows, and a learner does not.

    Attributes:
        task: Index of the true task.
        start: Index of its first batch.
        stop: Index after its last batch.
    """

    task: int
    start: int
    stop: int


class Stream:
    """Batches of tasks one after the other, without a sign of where one ends.

    Batch i is the same at every access, so that an interrupted learner resumes at any batch.

    Args:
        tasks: Training examples of each task.
        order: Which task comes when; a task may come again. By default each once.
        epochs: Passes over the examples of a task each time that it comes.
        batch_size: Examples in a batch; incomplete batches are left out.
        seed: Seed of the shuffling.
    """

    def __init__(
        self,
        tasks: Sequence[Split],
        *,
        order: Sequence[int] | None = None,
        epochs: int = 1,
        batch_size: int = 128,
        seed: int = 0,
    ) -> None:
        self.tasks = list(tasks)
        self.order = list(range(len(self.tasks))) if order is None else list(order)
        self.epochs, self.batch_size = checked_count("epochs", epochs), checked_count("batch_size", batch_size)
        self.seed = seed
        if not self.tasks or not self.order:
            raise ValueError("A stream needs at least one task.")
        for task in self.order:
            if not isinstance(task, int) or not 0 <= task < len(self.tasks):
                raise ValueError(f"order names task {task!r}; there are {len(self.tasks)}, counted from 0.")
            if len(self.tasks[task]) < batch_size:
                raise ValueError(
                    f"Task {task} has {len(self.tasks[task])} examples, fewer than a batch of {batch_size}: lower "
                    "batch_size."
                )
        self.segments: list[Segment] = []
        for task in self.order:
            start = self.segments[-1].stop if self.segments else 0
            self.segments.append(Segment(task, start, start + self.epochs * self._per_epoch(task)))

    def __len__(self) -> int:
        return self.segments[-1].stop

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batch(index) for index in range(len(self)))

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of batch `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"Batch {index} of a stream of {len(self)}.")
        place = next(i for i, segment in enumerate(self.segments) if index < segment.stop)
        segment = self.segments[place]
        epoch, batch = divmod(index - segment.start, self._per_epoch(segment.task))
        split = self.tasks[segment.task]
        generator = torch.Generator().manual_seed((self.seed * 1009 + place) * 10_007 + epoch)
        rows = torch.randperm(len(split), generator=generator)[batch * self.batch_size : (batch + 1) * self.batch_size]
        return split.x[rows], split.y[rows]

    def joint(self) -> Stream:
        """The same examples with all tasks mixed: the stream of joint training, as long as this one."""
        parts = [self.tasks[task] for task in self.order]
        together = Split(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
        return Stream([together], epochs=self.epochs, batch_size=self.batch_size, seed=self.seed)

    def _per_epoch(self, task: int) -> int:
        return len(self.tasks[task]) // self.batch_size
