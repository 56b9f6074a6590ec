"""The rows of a global batch that one process holds, and its slice of per-example random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The rows of the global batch held by this process: every `count`-th row, starting at `first`."""

    first: int = 0
    count: int = 1

    def of(self, make: Callable[[list[int]], Tensor], shape: Sequence[int]) -> Tensor:
        """Draw per-example random numbers of the given local shape, consistent with the global batch.

        Args:
            make: Draws a tensor of a given shape; called once, with the shape for the global batch.
            shape: Shape for the local batch; the first dimension counts examples.
        """
        if self.count == 1:
            return make(list(shape))
        return make([shape[0] * self.count, *shape[1:]])[self.first :: self.count].contiguous()

    def numbers(self, rows: int, device: torch.device) -> Tensor:
        """Global row indices of the `rows` local examples, on `device`."""
        return torch.arange(rows, device=device) * self.count + self.first


WHOLE = Rows()
