"""One epoch: its steps, from wherever it was left, with all of its randomness a function of seed and epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from credo.core.distributed.process_group import ProcessGroup
from credo.core.errors import CredoError
from credo.core.example_counts import Counted
from credo.core.posterior import Posterior, Terms
from credo.data import Batches
from credo.training.schedule import Schedule
from credo.training.state import Progress, set_global_generators

BatchNll = Callable[[nn.Module, Any], Tensor]
BatchCounts = Callable[[Any], Counted]
# Called with the epoch, from 1, the steps done of it, and how many it has.
OnStep = Callable[[int, int, int, Terms], None]
_TERMS = ("loss", "nll", "penalty", "kl")
_END = object()


class Loader(Protocol):
    """What training reads batches from: a DataLoader, `Batches`, a list."""

    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...


def run_epoch(
    posterior: Posterior,
    loader: Loader,
    nll: BatchNll,
    scale: Schedule,
    progress: Progress,
    seed: int,
    after_step: Callable[[Terms], None],
    counts: BatchCounts | None = None,
) -> Terms:
    """Make the steps that are left of the epoch, counting them in `progress`; the means of the terms over all of it."""
    total = len(loader)
    batches = _behind(loader, posterior.process_group, seed, progress)
    if progress.random is not None and posterior.process_group is None:
        set_global_generators(progress.random, posterior.device)
    if progress.step:  # stopped after the last step, an epoch has no other that would set its rate
        posterior.lr_scale = scale(progress.epoch + (progress.step - 1) / total)
    while True:
        batch = _next(batches, posterior.process_group, seed, progress.epoch, progress.step)
        if batch is _END:
            break
        posterior.lr_scale = scale(progress.epoch + progress.step / total)
        counted = {} if counts is None else counts(batch).given()
        terms = posterior.step(lambda net, batch=batch: nll(net, batch), **counted)
        _add(progress.sums, terms)
        progress.step += 1
        after_step(terms)
    if progress.step == 0:
        raise CredoError("The loader gave no batch.")
    means = {key: None if value is None else value / progress.step for key, value in progress.sums.items()}
    return Terms(**means)  # type: ignore[arg-type]


def _behind(loader: Loader, process_group: ProcessGroup | None, seed: int, progress: Progress) -> Iterator[Any]:
    """The epoch's batches after those that are done; a loader that cannot skip is read over them."""
    if isinstance(loader, Batches):
        loader.skip(progress.step)
        return iter(loader)
    if (
        process_group is not None
    ):  # a DataLoader's workers are seeded from here: parts of the data must not be augmented alike
        torch.manual_seed(_hashed(seed, progress.epoch, "workers", process_group.data_rank))
    batches = iter(loader)
    for step in range(progress.step):
        # Seeded as when they were trained on: a sampler draws the order of the epoch with the first batch.
        _next(batches, process_group, seed, progress.epoch, step)
    return batches


def _next(batches: Iterator[Any], process_group: ProcessGroup | None, seed: int, epoch: int, step: int) -> Any:
    """The next batch. When distributed, the global generators are seeded for each step, so no rank's state is kept.

    What a batch is made with (augmentation) is common to those who share it, what a pass draws (dropout) is each one's
    own.
    """
    if process_group is None:
        return next(batches, _END)
    place = (seed, epoch, step)
    torch.manual_seed(_hashed(*place, "batch", process_group.data_rank))
    batch = next(batches, _END)
    torch.manual_seed(_hashed(*place, "pass", process_group.rank))
    return batch


def _hashed(*parts: Any) -> int:
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _add(sums: dict[str, float | None], terms: Terms) -> None:
    for key in _TERMS:
        before, value = sums.get(key, 0.0), getattr(terms, key)
        sums[key] = None if before is None or value is None else before + value


@contextmanager
def seeded_epoch(loader: Loader, seed: int, epoch: int, device: torch.device) -> Iterator[None]:
    """All of torch's global randomness inside is a function of (seed, epoch); outside nothing changes."""
    for shuffler in (loader, getattr(loader, "sampler", None)):  # a DistributedSampler is told, too
        set_epoch = getattr(shuffler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        # A large odd multiplier keeps the streams of neighbouring seeds and epochs apart.
        torch.manual_seed((seed * 1_000_003 + epoch) % 2**63)
        yield
