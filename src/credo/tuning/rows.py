"""Held-out rows of `auto`: taken from the training data where none are given, and split once into two parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from credo.core.network.inputs import (
    AnyInputs,
    Forward,
    Inputs,
    ReadBatches,
    Target,
    read_batches,
    split_batch,
    tensors_of,
)
from credo.data import Batches, Split
from credo.training.rows.held_out import Divided, choose, chosen_rows, divide

Pairs = list[tuple[AnyInputs, Tensor]]
# With fewer held-out rows all take part in the choice, and the report is cross-fitted; else a third only reports.
LEAST_FOR_REPORT = 150
REPORT_PART = 3


@dataclass(frozen=True)
class Rows:
    """What is trained on, what chooses, and what decides nothing.

    Attributes:
        loader: Batches to train on, without held-out rows.
        whole: Batches of these rows and of those that choose, to train on when they have chosen; None: they are not
            given back.
        selection: The rows that choose, and calibrate.
        report: Rows that decide nothing and are not trained on; empty if there are too few.
    """

    loader: Any
    whole: Divided | None
    selection: Pairs
    report: Pairs


def given_rows(train: Any, validation: Any, seed: int, forward: Forward | None, target: Target | None) -> Rows:
    """The rows where held-out ones are given, which are not trained on.

    Args:
        train: As in `auto`.
        validation: As in `auto`.
        seed: Seed of the order and of the split.
        forward: As in `credo.fit`.
        target: As in `credo.fit`.
    """
    is_data_set = isinstance(validation, Dataset | Split) and not isinstance(validation, IterableDataset)
    rows = as_loader(validation, seed, shuffle=False) if is_data_set else validation
    return Rows(as_loader(train, seed), None, *nested(read_rows(rows, forward, target), seed))


def held_out(train: Any, seed: int, forward: Forward | None = None, target: Target | None = None) -> Rows:
    """Hold some training rows out; raises ValueError if that is not possible.

    Args:
        train: `Batches`, a `DataLoader` of a data set with a length, such a data set, a `Split`, or a list of batches.
        seed: Seed of the choice.
        forward: As in `credo.fit`.
        target: As in `credo.fit`.
    """
    loader = as_loader(train, seed)
    chosen = choose(loader, seed)
    rest, rows = divide(loader, chosen)
    if isinstance(loader, Sequence):  # of whole batches, of which some rows report
        pairs, rows = read_rows(rows, forward, target), list(rows)
        selection, report = nested(pairs, seed)
        return Rows(rest, None if report else Divided(loader, rest, rows), selection, report)
    if len(chosen) < LEAST_FOR_REPORT:
        return Rows(rest, Divided(loader, rest, list(rows)), read_rows(rows, forward, target), [])
    places, ordered = chosen_rows(len(chosen), len(chosen) // REPORT_PART, seed), sorted(chosen)
    reports = {row for place, row in enumerate(ordered) if place in places}
    whole, report_rows = divide(loader, reports)
    batches = list(divide(loader, chosen - reports)[1])
    selection = read_rows(batches, forward, target)
    return Rows(rest, Divided(whole, rest, batches), selection, read_rows(report_rows, forward, target))


def as_loader(train: Any, seed: int, batch_size: int = 64, *, shuffle: bool = True) -> Any:
    """Batches of a `Split` or of a data set with a length; batches as they are.

    Args:
        train: What `auto` was given.
        seed: Seed of the order.
        batch_size: Rows in a batch.
        shuffle: Whether the order is random.
    """
    if isinstance(train, Split):
        return Batches(train, batch_size=batch_size, seed=seed, shuffle=shuffle)
    if isinstance(train, Dataset) and hasattr(train, "__len__"):
        return DataLoader(train, batch_size=batch_size, shuffle=shuffle)
    if not hasattr(train, "__len__") or not hasattr(train, "__iter__"):
        raise ValueError(
            f"train must be batches with a length (a DataLoader, credo.data.Batches, a list) or a data set, got a "
            f"{type(train).__name__}. credo.data.WithLength gives a loader its length."
        )
    return train


def read_rows(batches: Iterable[Any], forward: Forward | None, target: Target | None) -> Pairs:
    """Batches as (inputs, targets), in memory; raises ValueError if there are no targets.

    Args:
        batches: Of any form.
        forward: As in `credo.fit`.
        target: As in `credo.fit`.
    """
    found = [split_batch(batch) for batch in read_batches(batches, forward, target)]
    if not found or any(y is None for _, y in found):
        raise ValueError("validation must be batches with targets: (inputs, targets), or mappings with `labels`.")
    return found  # type: ignore[return-value]


def read_inputs(ood: Any, forward: Forward | None) -> list[AnyInputs]:
    """OOD inputs as batches in memory; targets that come with them are left out.

    Args:
        ood: A tensor of inputs, batches, or a data set; None: no inputs.
        forward: As in `credo.fit`.
    """
    if ood is None:
        return []
    if isinstance(ood, Tensor):
        return list(ood.split(512))
    batches = as_loader(ood, seed=0, shuffle=False) if isinstance(ood, Dataset | Split) else ood
    found = [inputs for inputs, _ in ReadBatches(batches, forward, None)]
    if not found:
        raise ValueError("ood has no batch: give OOD inputs, as a tensor, batches or a data set.")
    return found


def count_inputs(batches: Iterable[AnyInputs]) -> int:
    """Number of inputs in batches without targets.

    Args:
        batches: The batches.
    """
    tensors = map(tensors_of, batches)
    return sum(len(each[0]) if each else 1 for each in tensors)


def count_rows(pairs: Iterable[tuple[Any, Tensor]]) -> int:
    """Number of rows in batches of (inputs, targets).

    Args:
        pairs: The batches.
    """
    return sum(len(y) for _, y in pairs)


def nested(pairs: Pairs, seed: int) -> tuple[Pairs, Pairs]:
    """Split rows at random into a part that chooses and a part that reports, empty if there are too few.

    Args:
        pairs: Batches of (inputs, targets).
        seed: Seed of the split.
    """
    total = count_rows(pairs)
    if total < LEAST_FOR_REPORT:
        return pairs, []
    if not all(has_rows(x, y) for x, y in pairs):  # batches that cannot be taken apart go as a whole
        chosen = chosen_rows(len(pairs), len(pairs) // REPORT_PART, seed)
        parts = [[pair for i, pair in enumerate(pairs) if (i in chosen) == reports] for reports in (False, True)]
        return (parts[0], parts[1]) if parts[0] else (pairs, [])
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    reports = torch.zeros(total, dtype=torch.bool)
    reports[order[: total // REPORT_PART]] = True
    selection: Pairs = []
    report: Pairs = []
    start = 0
    for x, y in pairs:
        mask = reports[start : start + len(y)]
        start += len(y)
        for part, rows in ((selection, (~mask).nonzero().flatten()), (report, mask.nonzero().flatten())):
            if len(rows):
                part.append((x[rows.to(y.device)], y[rows.to(y.device)]))
    return selection, report


def has_rows(x: AnyInputs, y: Tensor) -> bool:
    """Whether a batch can be taken apart into rows.

    Args:
        x: Its inputs.
        y: Its targets.
    """
    return not isinstance(x, Inputs) or {len(tensor) for tensor in x.tensors()} == {len(y)}
