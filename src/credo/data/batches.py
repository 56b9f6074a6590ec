"""Batches straight from memory: no worker processes, and every batch a pure function of seed and epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from credo.data.augment import AUGMENTATIONS, Augment
from credo.data.splits import Split


class Batches:
    """Batches `(x float32, y)` of a split, to be iterated as often as wanted; images arrive in [0, 1].

    Order and augmentation depend on seed and epoch alone, so a resumed run that calls `set_epoch` sees the batches
    of the uninterrupted one. Each iteration, even a broken-off one, moves on to the next epoch.

    Of `world` ranks, each takes every world-th example of the common order: batch i of all ranks together is batch i
    of one process with a batch size `world` times as large (augmentation is drawn for each rank apart). The order is
    padded with examples from its beginning to a multiple of `world`, so that no rank waits for another; to count every
    test example exactly once, evaluate with `world=1`.
    """

    def __init__(
        self,
        split: Split,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        augment: Augment | str | None = None,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if len(split) == 0:
            raise ValueError("the split is empty: there is nothing to make batches of")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: at least 1 is needed")
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} of world={world}: ranks go from 0 to world - 1")
        self.split = split
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.augment = _augmentation(augment)
        self.rank = rank
        self.world = world
        self.drop_last = drop_last
        self.device = device
        self.epoch = 0
        if len(self) == 0:
            raise ValueError(
                f"drop_last leaves no batch: a rank has {self._share} examples, batch_size is {batch_size}"
            )

    @property
    def data_size(self) -> int:
        """Number of examples in the whole split, over all ranks: the N of the objective."""
        return len(self.split)

    @property
    def _share(self) -> int:
        return -(-len(self.split) // self.world)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration the one of that epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        full, rest = divmod(self._share, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Not a generator function: the epoch moves on when the iteration is asked for, not at its first batch.
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._batches(epoch)

    def indices(self, epoch: int) -> Tensor:
        """Which examples this rank sees in that epoch, in order."""
        count = len(self.split)
        order = torch.arange(count)
        if self.shuffle:
            order = torch.randperm(count, generator=_generator(self.seed, epoch, "order"))
        padded = order[torch.arange(self._share * self.world) % count]
        return padded[self.rank :: self.world]

    def _batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        indices = self.indices(epoch)
        generator = _generator(self.seed, epoch, f"augment {self.rank}")
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            chosen = indices[start : start + self.batch_size].to(self.split.x.device)
            # Bytes are moved before they become floats: a quarter of the transfer.
            x, y = (part[chosen].to(device=self.device) for part in (self.split.x, self.split.y))
            yield self.augment(as_float(x), generator), y


def as_float(x: Tensor) -> Tensor:
    """Images from bytes to float32 in [0, 1]; what is float already stays as it is."""
    return x.float().div_(255) if x.dtype == torch.uint8 else x


def _augmentation(augment: Augment | str | None) -> Augment:
    if callable(augment):
        return augment
    name = "none" if augment is None else augment
    if name not in AUGMENTATIONS:
        raise ValueError(f"augment={name!r}: possible are {', '.join(AUGMENTATIONS)}, or a function of your own")
    return AUGMENTATIONS[name]


def _generator(seed: int, epoch: int, purpose: str) -> torch.Generator:
    """A generator of its own for each seed, epoch and purpose; hashed, since nearby seeds give related streams."""
    digest = hashlib.sha256(f"{seed} {epoch} {purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
