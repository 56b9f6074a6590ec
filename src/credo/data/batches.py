"""Batches from memory, without worker processes; every batch is a pure function of seed and epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from credo.data.augment import (
    AUGMENTATIONS,
    Augment,
    augment_flip,
    augment_flip_crop,
    draw_flip_crop,
    flip_crop,
    no_augmentation,
)
from credo.data.splits import Split

# Augmentations whose draws can be made without the images, and their padding.
_PADS: tuple[tuple[Augment, int], ...] = ((augment_flip_crop, 4), (augment_flip, 0))


class Batches:
    """Batches `(x float32, y)` of a split, iterable any number of times; images are in [0, 1].

    Order and augmentation depend on seed and epoch only, so a resumed run that calls `set_epoch` sees the batches of
    the uninterrupted one. Each iteration, even an unfinished one, advances to the next epoch.

    With `world` ranks, each takes every world-th example of the common order: batch i of all ranks together is batch i
    of one process with a batch size `world` times as large, augmented alike. The order is padded with examples from its
    beginning to a multiple of `world`; to count every test example exactly once, evaluate with `world=1`.

    Args:
        split: The examples.
        batch_size: Examples per batch, of one rank.
        shuffle: Whether every epoch has its own order.
        seed: Seed of order and augmentation.
        augment: A name in `AUGMENTATIONS`, or a function of images and generator (which draws separately on each rank).
        rank: Index of this process.
        world: Number of processes.
        drop_last: Leave out a last batch that is smaller.
        device: Where batches are moved to.
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
        self._pad = next((pad for known, pad in _PADS if known is self.augment), None)
        if self._pad is not None and split.x.dim() != 4:
            raise ValueError(f"images are [batch, channels, height, width]; got shape {list(split.x.shape)}")
        self.rank = rank
        self.world = world
        self.drop_last = drop_last
        self.device = device
        self.epoch = 0
        self._skipped = 0
        if len(self) == 0:
            raise ValueError(
                f"drop_last leaves no batch: there are {len(split)} examples, a batch of all ranks has "
                f"{batch_size * world}"
            )

    @property
    def data_size(self) -> int:
        """Number of examples in the split, over all ranks: N of the objective."""
        return len(self.split)

    @property
    def _shard_size(self) -> int:
        return -(-len(self.split) // self.world)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def skip(self, batches: int) -> None:
        """Start the next iteration after that many batches of its epoch, without loading them."""
        if not 0 <= batches <= len(self):
            raise ValueError(f"skip({batches}): an epoch has {len(self)} batches")
        self._skipped = batches

    def shard(self, rank: int, world: int) -> Batches:
        """Return the batches of rank `rank` of `world`; all ranks together load the batches of this one."""
        if self.world != 1:
            raise ValueError(f"these batches are the shard of rank {self.rank} of {self.world} already")
        if self.batch_size % world:
            raise ValueError(
                f"batch_size={self.batch_size} is the batch of all processes together and cannot be divided equally by "
                f"{world}: choose a multiple of {world}"
            )
        shard = Batches(
            self.split,
            batch_size=self.batch_size // world,
            shuffle=self.shuffle,
            seed=self.seed,
            augment=self.augment,
            rank=rank,
            world=world,
            drop_last=self.drop_last,
            device=self.device,
        )
        shard.epoch = self.epoch
        return shard

    @property
    def last_size(self) -> int:
        """Number of examples in this rank's last batch of an epoch."""
        return min(self.batch_size, self._shard_size - (len(self) - 1) * self.batch_size)

    def __len__(self) -> int:
        # Over all ranks, so that the number of ranks does not matter.
        full, rest = divmod(len(self.split), self.batch_size * self.world)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Not a generator function: the epoch advances when the iterator is made, not at its first batch.
        epoch, self.epoch = self.epoch, self.epoch + 1
        skipped, self._skipped = self._skipped, 0
        return self._batches(epoch, skipped)

    def indices(self, epoch: int) -> Tensor:
        """Return the indices of the examples that this rank sees in that epoch, in order."""
        count = len(self.split)
        order = torch.arange(count)
        if self.shuffle:
            order = torch.randperm(count, generator=_generator(self.seed, epoch, "order"))
        padded = order[torch.arange(self._shard_size * self.world) % count]
        return padded[self.rank :: self.world]

    def _batches(self, epoch: int, skipped: int) -> Iterator[tuple[Tensor, Tensor]]:
        indices = self.indices(epoch)
        # A custom function may draw anything, separately on each rank, so it also runs on skipped batches.
        custom = self._pad is None and self.augment is not no_augmentation
        generator = _generator(self.seed, epoch, f"augment {self.rank if custom else 0}")
        for number in range(len(self)):
            chosen = indices[number * self.batch_size : (number + 1) * self.batch_size]
            draws = None if self._pad is None else self._drawn(len(chosen), self._pad, generator)
            if number < skipped and not custom:
                continue
            chosen = chosen.to(self.split.x.device)
            # Moved before they become floats: a quarter of the transfer.
            x, y = (part[chosen].to(device=self.device) for part in (self.split.x, self.split.y))
            x = as_float(x)
            x = self.augment(x, generator) if draws is None else flip_crop(x, *draws, pad=self._pad or 0)
            if number >= skipped:
                yield x, y

    def _drawn(self, count: int, pad: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's part of the draws for the batch of all ranks."""
        mine = slice(self.rank, None, self.world)
        mirrored, down, right = draw_flip_crop(count * self.world, generator, pad=pad, flip=True)
        return mirrored[mine], down[mine], right[mine]


def as_float(x: Tensor) -> Tensor:
    """Convert bytes to float32 in [0, 1]; floats are returned unchanged."""
    return x.float().div_(255) if x.dtype == torch.uint8 else x


def _augmentation(augment: Augment | str | None) -> Augment:
    if callable(augment):
        return augment
    name = "none" if augment is None else augment
    if name not in AUGMENTATIONS:
        raise ValueError(f"augment={name!r}: possible are {', '.join(AUGMENTATIONS)}, or your own function")
    return AUGMENTATIONS[name]


def _generator(seed: int, epoch: int, purpose: str) -> torch.Generator:
    """Return a generator for this seed, epoch and purpose; hashed, since nearby seeds give related streams."""
    digest = hashlib.sha256(f"{seed} {epoch} {purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
