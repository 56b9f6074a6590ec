"""Validate and read the batches given to training and prediction."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from credo.core.errors import InputsError


def check_batches(given: Any, *, also: str = "") -> None:
    """Raise TypeError with advice if `given` is a data set of examples, or not iterable.

    `also` names what else would be accepted.
    """
    if isinstance(given, Dataset) and not isinstance(given, IterableDataset):
        advice = "torch.utils.data.DataLoader(data, batch_size=128) makes batches of it"
    elif (
        isinstance(given, str | Mapping)
        or (hasattr(given, "__array__") and not isinstance(given, Tensor))
        or not (isinstance(given, Iterable) or hasattr(given, "__getitem__"))
    ):
        made = "credo.data.Batches(data.train, batch_size=128) of a Split"
        advice = f"give {also}a DataLoader, a list of batches, or {made}"
        if also and hasattr(given, "__array__"):  # NumPy's, and tables of others
            advice = "torch.as_tensor(x, dtype=torch.float32) makes a tensor of it (of a DataFrame: x.to_numpy())"
    else:
        return
    raise TypeError(f"Batches are needed, got a {type(given).__name__}: {advice}.")


def as_batches(given: Any) -> Any:
    """The same batches; a pair of tensors, (inputs, targets), is one batch.

    Args:
        given: What the user gave.
    """
    is_pair = isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, Tensor) for part in given)
    return [given] if is_pair else given


@contextmanager
def pair_explained(given: Any) -> Iterator[None]:
    """While open, an error of inputs says that two tensors are two batches, if they do not look like inputs alike.

    Args:
        given: What the user gave as inputs.
    """
    try:
        yield
    except (ValueError, RuntimeError, TypeError) as error:
        if as_batches(given) is given or len({(part.shape[1:], part.dtype) for part in given}) == 1:
            raise
        raise InputsError(
            f"Two tensors (x, y) are two batches of inputs; one batch of both is [(x, y)]. ({error})"
        ) from error


def batch_count(batches: Any) -> int | None:
    """Number of batches; None where it is not known, as of a loader of an iterable data set.

    Args:
        batches: What is iterated.
    """
    try:
        return len(batches)
    except TypeError:
        return None


_END = object()


def read_quietly(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches without advancing torch's global generator.

    A DataLoader takes a seed from that generator whenever it is iterated. One that does not shuffle gets its own
    generator; for others the global state is swapped while they make a batch. A thread that uses the global generator
    at that moment would be disturbed: give such a loader a `generator`.
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
