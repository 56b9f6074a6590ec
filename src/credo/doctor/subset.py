"""Random examples of a loader to measure on, without changing the loader's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.core.network.inputs import AnyInputs, join_inputs
from credo.predict.run import batches_of

Batch = tuple[AnyInputs, Tensor]


@dataclass(frozen=True, eq=False)
class Subset:
    """Some examples of a loader; `examples`, `batches` and (largest) `batch_size` are those of the whole loader."""

    x: AnyInputs
    y: Tensor
    examples: int
    batches: int
    batch_size: int

    def __len__(self) -> int:
        return len(self.x)

    def split(self, size: int | None = None) -> list[Batch]:
        """The examples in batches of `size`, by default that of the loader."""
        size = size or self.batch_size
        return list(zip(self.x.split(size), self.y.split(size), strict=True))


def take_subset(loader: Iterable[Any], *, most: int, data_size: int | None = None, seed: int = 0) -> Subset:
    """Sample at most `most` examples of a loader of (inputs, targets) uniformly, by `seed`.

    The loader is iterated once, to count it; with a known `data_size` only until there are enough examples.
    """
    if most < 1:
        raise ValueError(f"examples={most}: at least one is needed.")
    if data_size is not None and data_size < 1:
        raise ValueError(f"data_size={data_size} must be the number of training examples.")
    generator = torch.Generator().manual_seed(seed)
    kept: list[Batch] = []
    keys = torch.empty(0)
    count = batches = largest = 0
    with loader_restored(loader):
        for x, y in batches_of(loader, most):
            if y is None:
                raise ValueError("The doctor needs targets: give a loader of (inputs, targets).")
            count, batches, largest = count + len(x), batches + 1, max(largest, len(x))
            keys = torch.cat([keys, torch.rand(len(x), generator=generator)])
            kept, keys = _smallest([*kept, (x, y)], keys, most)
            if data_size is not None and count >= most:
                break
    if not count:
        raise ValueError("The loader is empty: there is nothing to measure.")
    x, y = join_inputs([x for x, _ in kept]), torch.cat([y for _, y in kept])
    order = keys.argsort()  # a loader that is sorted by class would give batches of one class
    if data_size is not None:
        count, batches = data_size, -(-data_size // largest)
    return Subset(x[order], y[order.to(y.device)], count, batches, largest)


def _smallest(batches: list[Batch], keys: Tensor, most: int) -> tuple[list[Batch], Tensor]:
    """The examples with the `most` smallest keys; batches are joined only if some are dropped."""
    if len(keys) <= most:
        return batches, keys
    chosen = keys.argsort()[:most].sort().values
    x, y = join_inputs([x for x, _ in batches]), torch.cat([y for _, y in batches])
    return [(x[chosen], y[chosen.to(y.device)])], keys[chosen]


@contextmanager
def loader_restored(loader: Any) -> Iterator[None]:
    """Restore the generators and the epoch of a loader on exit, so that iterating it does not affect training."""
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    sources = [source for source in (loader, getattr(loader, "sampler", None), inner) if source is not None]
    found = [getattr(source, "generator", None) for source in sources]
    states = [(g, g.get_state()) for g in found if isinstance(g, torch.Generator)]
    epochs = [(source, source.epoch) for source in sources if isinstance(getattr(source, "epoch", None), int)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        for source, epoch in epochs:
            source.epoch = epoch
