"""Validate and read the batches given to training and prediction."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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


def generators_of(loader: Any) -> list[torch.Generator]:
    """Generators of a DataLoader and of its samplers.

    Args:
        loader: Any loader; others have none.
    """
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    found = [getattr(owner, "generator", None) for owner in (loader, getattr(loader, "sampler", None), inner)]
    return [generator for generator in dict.fromkeys(found) if isinstance(generator, torch.Generator)]


@dataclass(frozen=True)
class LoaderState:
    """What decides the order of a loader's batches when it is iterated next.

    Attributes:
        random: State of torch's global generator.
        generators: States of the loader's own.
        epoch: The epoch that it counts by itself; None: it counts none.
    """

    random: Tensor
    generators: list[Tensor]
    epoch: int | None

    @staticmethod
    def of(loader: Any) -> LoaderState:
        """That of a loader.

        Args:
            loader: The loader.
        """
        epoch = getattr(loader, "epoch", None) if callable(getattr(loader, "set_epoch", None)) else None
        states = [generator.get_state() for generator in generators_of(loader)]
        return LoaderState(torch.get_rng_state(), states, epoch if isinstance(epoch, int) else None)

    def restore_(self, loader: Any) -> None:
        """Let the loader give the batches of that time again, if it is read from the global state `random`.

        Args:
            loader: A loader like the one that it was taken of.
        """
        for generator, state in zip(generators_of(loader), self.generators, strict=False):
            generator.set_state(state)
        if self.epoch is not None:
            loader.set_epoch(self.epoch)


def read_quietly(batches: Iterable[Any], random: Tensor | None = None) -> Iterator[Any]:
    """Yield the batches without advancing torch's global generator.

    A DataLoader takes a seed from that generator whenever it is iterated. One that does not shuffle gets its own
    generator; for others the global state is swapped while they make a batch. A thread that uses the global generator
    at that moment would be disturbed: give such a loader a `generator`.

    Args:
        batches: The loader.
        random: State of the global generator to read them from; None: that of now.
    """
    if random is None and isinstance(batches, DataLoader) and _is_in_order(batches):
        loader = copy.copy(batches)
        loader.generator = torch.Generator() if batches.generator is None else batches.generator
        yield from loader
        return
    source: Iterator[Any] | None = None
    state = torch.get_rng_state() if random is None else random
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


def _is_in_order(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.sampler, SequentialSampler) and not loader.num_workers
