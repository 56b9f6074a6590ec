"""Which examples of a batch a process has, and its part of random numbers for them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Which examples of a larger batch this process has: every `count`-th, from `first` on."""

    first: int = 0
    count: int = 1

    def of(self, make: Callable[[list[int]], Tensor], shape: Sequence[int]) -> Tensor:
        """Random numbers of this shape, whose first dimension is examples: our rows of those for the larger batch."""
        if self.count == 1:
            return make(list(shape))
        return make([shape[0] * self.count, *shape[1:]])[self.first :: self.count].contiguous()

    def numbers(self, rows: int, device: torch.device) -> Tensor:
        """Where our examples are in the larger batch."""
        return torch.arange(rows, device=device) * self.count + self.first


WHOLE = Rows()
