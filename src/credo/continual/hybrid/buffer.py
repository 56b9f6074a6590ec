"""A buffer of examples: a uniform sample of everything that a stream has shown (reservoir sampling, Vitter 1985)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Reservoir:
    """Keeps each example of a stream with the same probability.

    Args:
        size: Number of examples to keep.
    """

    def __init__(self, size: int) -> None:
        self.size, self.seen = size, 0
        self.rows: tuple[Tensor, Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return min(self.seen, self.size)

    def add_(self, x: Tensor, y: Tensor, task: int, generator: torch.Generator) -> None:
        """Offer the rows of a batch of one `task`; randomness from `generator`."""
        if self.rows is None:
            tasks = torch.zeros(self.size, dtype=torch.int64)
            self.rows = (x.new_zeros(self.size, *x.shape[1:]), torch.zeros_like(tasks), tasks)
        for row, label in zip(x, y, strict=True):
            place = self.seen
            if place >= self.size:
                place = int(torch.randint(self.seen + 1, (), generator=generator))
            if place < self.size:
                for kept, value in zip(self.rows, (row, label, torch.tensor(task)), strict=True):
                    kept[place] = value
            self.seen += 1

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, labels and tasks of `count` random examples, with replacement."""
        if self.rows is None:
            raise RuntimeError("The buffer is empty: add examples first.")
        chosen = torch.randint(len(self), (count,), generator=generator)
        x, y, tasks = self.rows
        return x[chosen], y[chosen], tasks[chosen]

    def state(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"seen": self.seen, "rows": None if self.rows is None else list(self.rows)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from `state()`."""
        self.seen, rows = state["seen"], state["rows"]
        self.rows = None if rows is None else tuple(row.clone() for row in rows)
