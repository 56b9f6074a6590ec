"""A uniform sample of the rows of a stream, of bounded size."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Sample:
    """The rows of a stream that have the smallest of random keys: uniform, without replacement.

    The keys are drawn before the rows are made, so that only rows that may stay need to be: about
    most·(1 + log(n/most)) of n.

    Args:
        most: Rows to keep.
        seed: Seed of the keys.
    """

    def __init__(self, most: int, seed: int = 0) -> None:
        self.most, self._generator = most, torch.Generator().manual_seed(seed)
        self._keys, self._new = torch.empty(0), torch.empty(0)
        self._limit = math.inf
        self._columns: list[list[Tensor]] = []

    def wanted(self, rows: int) -> Tensor:
        """Indices of those of the next `rows` that may stay, which `add` must be given."""
        keys = torch.rand(rows, generator=self._generator)
        chosen = (keys < self._limit).nonzero().squeeze(-1)
        self._new = keys[chosen]
        return chosen

    def add(self, columns: list[Tensor]) -> None:
        """Add the wanted rows, as tensors [rows, …] of any number of columns, which is always the same."""
        self._keys = torch.cat([self._keys, self._new])
        self._columns = self._columns or [[] for _ in columns]
        for column, values in zip(self._columns, columns, strict=True):
            column.append(values)
        if len(self._keys) > 2 * self.most:  # not at every batch: each time all rows are copied
            self._shrink()

    def columns(self) -> list[Tensor]:
        """All columns, in the order of the stream; none if there were no rows."""
        self._shrink()
        return [torch.cat(column) for column in self._columns]

    def _shrink(self) -> None:
        if len(self._keys) <= self.most:
            return
        kept = self._keys.argsort()[: self.most].sort().values
        self._keys = self._keys[kept]
        self._limit = float(self._keys.max())
        self._columns = [[torch.cat(column)[kept.to(column[0].device)]] for column in self._columns]
