"""The batches of one epoch, from any step on, with all randomness a function of seed and epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from credo.core.distributed.process_group import ProcessGroup
from credo.data import Batches
from credo.training.state import Progress

END = object()


class Loader(Protocol):
    """A sized iterable of batches: a DataLoader, `Batches`, a list."""

    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...


@contextmanager
def seeded_epoch(loader: Loader, seed: int, epoch: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators with (seed, epoch) inside the block, and restore them afterwards.

    Args:
        loader: It and its sampler are told the epoch if they have `set_epoch`.
        seed: Seed of the training.
        epoch: Number of finished epochs.
        device: A CUDA device's generator is seeded, too.
    """
    for shuffler in (loader, getattr(loader, "sampler", None)):
        set_epoch = getattr(shuffler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        # A large odd multiplier keeps the streams of neighbouring seeds and epochs apart. `torch.manual_seed` also asks
        # every kind of accelerator, which takes longer than a step of a small network.
        manual_seed = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
        manual_seed((seed * 1_000_003 + epoch) % 2**63)
        yield


def remaining_batches(
    loader: Loader, process_group: ProcessGroup | None, seed: int, progress: Progress
) -> Iterator[Any]:
    """Iterate over the epoch's batches after the steps that are done.

    Args:
        loader: `Batches` skip to the step; other loaders are read up to it.
        process_group: The processes that train together, or None.
        seed: Seed of the training.
        progress: Current epoch and step.
    """
    if isinstance(loader, Batches):
        loader.skip(progress.step)
        return iter(loader)
    if process_group is not None:  # DataLoader workers take their seeds from here: data shards need different ones
        torch.manual_seed(_hashed(seed, progress.epoch, "workers", process_group.data_rank))
    batches = iter(loader)
    for step in range(progress.step):
        # Seeded as in training: a sampler draws the order of the epoch with the first batch.
        next_batch(batches, process_group, seed, progress.epoch, step)
    return batches


def next_batch(batches: Iterator[Any], process_group: ProcessGroup | None, seed: int, epoch: int, step: int) -> Any:
    """Return the next batch, or `END`.

    When distributed, the global generators are seeded for every step, so that no rank's generator state has to be
    saved: making a batch (augmentation) is seeded alike for ranks that share it, the forward pass (dropout) is not.

    Args:
        batches: Iterator over the epoch's batches.
        process_group: The processes that train together, or None.
        seed: Seed of the training.
        epoch: Number of finished epochs.
        step: Number of finished steps of the epoch.
    """
    if process_group is None:
        return next(batches, END)
    torch.manual_seed(_hashed(seed, epoch, step, "batch", process_group.data_rank))
    batch = next(batches, END)
    torch.manual_seed(_hashed(seed, epoch, step, "pass", process_group.rank))
    return batch


def _hashed(*parts: Any) -> int:
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
