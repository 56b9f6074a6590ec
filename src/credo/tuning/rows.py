"""Held-out rows of `auto`: taken from the training data where none are given, and split once into two parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from credo.core.network.inputs import AnyInputs, Forward, Inputs, Target, read_batches, split_batch
from credo.data import Batches, Split
from credo.training.rows.held_out import chosen_rows, hold_out

Pairs = list[tuple[AnyInputs, Tensor]]
# With fewer held-out rows all take part in the choice, and the report is cross-fitted; else a third only reports.
LEAST_FOR_REPORT = 150
REPORT_PART = 3


def held_out(train: Any, seed: int, batch_size: int = 64) -> tuple[Any, list[Any]]:
    """Training batches without some rows, and batches of these rows; raises ValueError if that is not possible.

    Args:
        train: `Batches`, a `DataLoader` of a data set with a length, such a data set, a `Split`, or a list of batches.
        seed: Seed of the choice.
        batch_size: Of a data set or split that has no batches.
    """
    rest, rows = hold_out(as_loader(train, seed, batch_size), seed)
    return rest, list(rows)


def as_loader(train: Any, seed: int, batch_size: int = 64) -> Any:
    """Batches of a `Split` or of a data set with a length; batches as they are.

    Args:
        train: What `auto` was given.
        seed: Seed of the order.
        batch_size: Rows in a batch.
    """
    if isinstance(train, Split):
        return Batches(train, batch_size=batch_size, seed=seed)
    if isinstance(train, Dataset) and hasattr(train, "__len__"):
        return DataLoader(train, batch_size=batch_size, shuffle=True)
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
    if not all(_has_rows(x, y) for x, y in pairs):  # batches that cannot be taken apart go as a whole
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


def _has_rows(x: AnyInputs, y: Tensor) -> bool:
    return not isinstance(x, Inputs) or {len(tensor) for tensor in x.tensors()} == {len(y)}
