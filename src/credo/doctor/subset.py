"""Examples to measure on: a random few of a loader, which is left as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.predict.run import batches_of

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Sample:
    """Some examples of a loader, and what the loader is: `examples` it gives in all, in batches of what size."""

    x: Tensor
    y: Tensor
    examples: int
    batches: int
    batch_size: int

    def __len__(self) -> int:
        return len(self.x)

    def split(self, size: int | None = None) -> list[Batch]:
        """The kept examples in batches, by default as large as the loader's."""
        size = size or self.batch_size
        return list(zip(self.x.split(size), self.y.split(size), strict=True))


def take(loader: Iterable[Any], *, most: int, data_size: int | None = None, seed: int = 0) -> Sample:
    """At most `most` examples of a loader of (inputs, targets), each with the same chance.

    Goes through the loader once, to count it. If `data_size` says how many there are, it stops once it has enough: the
    kept ones are then the loader's first.
    """
    if most < 1:
        raise ValueError(f"examples={most}: at least one is needed.")
    if data_size is not None and data_size < 1:
        raise ValueError(f"data_size={data_size} must be the number of training examples.")
    generator = torch.Generator().manual_seed(seed)
    kept: list[Batch] = []
    keys = torch.empty(0)
    count = batches = largest = 0
    with undisturbed(loader):
        for x, y in batches_of(loader, most):
            if y is None:
                raise ValueError("The doctor needs targets: give a loader of (inputs, targets).")
            count, batches, largest = count + len(x), batches + 1, max(largest, len(x))
            keys = torch.cat([keys, torch.rand(len(x), generator=generator)])
            kept, keys = _smallest([*kept, (x, y)], keys, most)
            if data_size is not None and count >= most:
                break
    if not count:
        raise ValueError("The loader gave no example: there is nothing to measure.")
    x, y = (torch.cat([batch[side] for batch in kept]) for side in (0, 1))
    order = keys.argsort()  # a loader that is sorted by class would give batches of one class
    if data_size is not None:
        count, batches = data_size, -(-data_size // largest)
    return Sample(x[order.to(x.device)], y[order.to(y.device)], count, batches, largest)


def _smallest(batches: list[Batch], keys: Tensor, most: int) -> tuple[list[Batch], Tensor]:
    """The examples with the `most` smallest keys; joined only when there is something to leave out."""
    if len(keys) <= most:
        return batches, keys
    chosen = keys.argsort()[:most].sort().values
    x, y = (torch.cat([batch[side] for batch in batches]) for side in (0, 1))
    return [(x[chosen.to(x.device)], y[chosen.to(y.device)])], keys[chosen]


@contextmanager
def undisturbed(loader: Any) -> Iterator[None]:
    """A loader may be gone through inside; its own generators and its epoch come back: training goes on as before."""
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    places = [place for place in (loader, getattr(loader, "sampler", None), inner) if place is not None]
    found = [getattr(place, "generator", None) for place in places]
    states = [(g, g.get_state()) for g in found if isinstance(g, torch.Generator)]
    epochs = [(place, place.epoch) for place in places if isinstance(getattr(place, "epoch", None), int)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        for place, epoch in epochs:
            place.epoch = epoch
