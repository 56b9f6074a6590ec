"""Loaders of iterable data sets, with a given number of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from credo.core.errors import CredoError
from credo.core.support.validate import checked_count


class WithLength:
    """The first `batches` batches of a loader that does not know its own length, as one epoch.

    Every epoch reads the loader from its start. Raises CredoError if it ends before.

    Args:
        loader: An iterable that can be read several times, such as the DataLoader of an `IterableDataset`.
        batches: Batches of an epoch.
    """

    def __init__(self, loader: Iterable[Any], batches: int) -> None:
        if isinstance(loader, Iterator):
            raise TypeError(
                f"Every epoch reads the loader from its start, which a {type(loader).__name__} cannot be: give the "
                "DataLoader or a list of batches."
            )
        self.loader, self.batches = loader, checked_count("batches", batches)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for batch in islice(self.loader, self.batches):
            count += 1
            yield batch
        if count < self.batches:
            raise CredoError(
                f"The loader ended after {count} of {self.batches} batches: give batches={count} or fewer."
            )
