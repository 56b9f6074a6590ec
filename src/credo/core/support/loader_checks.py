"""What training and prediction read batches from."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler


def check_batches(given: Any, *, also: str = "") -> None:
    """Refuse what holds examples and not batches, or nothing to read, and say how to make batches of it.

    `also` names what else would do.
    """
    if isinstance(given, Dataset) and not isinstance(given, IterableDataset):
        advice = "torch.utils.data.DataLoader(data, batch_size=128) makes batches of it"
    elif isinstance(given, str | Mapping | np.ndarray) or not (
        isinstance(given, Iterable) or hasattr(given, "__getitem__")
    ):
        made = "credo.data.Batches(data.train, batch_size=128) of a Split"
        advice = f"give {also}a DataLoader, a list of batches, or {made}"
    else:
        return
    raise TypeError(f"Batches are needed, got a {type(given).__name__}: {advice}.")


_END = object()


def read_quietly(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, read so that torch's global generator is afterwards what it was.

    A DataLoader takes a seed from that generator whenever it is read. One that does not shuffle gets a generator of its
    own; others find a state of their own while they make a batch, and only then: a thread that trains and uses the
    global generator in that very moment would be disturbed. Give such a loader a `generator` where that may happen.
    """
    if isinstance(batches, DataLoader) and isinstance(batches.sampler, SequentialSampler) and not batches.num_workers:
        loader = copy.copy(batches)
        loader.generator = torch.Generator() if batches.generator is None else batches.generator
        yield from loader
        return
    source: Iterator[Any] | None = None
    state = torch.get_rng_state()
    while True:
        outside = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            source = iter(batches) if source is None else source
            batch = next(source, _END)
            state = torch.get_rng_state()
        finally:
            torch.set_rng_state(outside)
        if batch is _END:
            return
        yield batch
