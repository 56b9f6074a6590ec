"""Held-out rows of `auto`: taken from the training data where none are given, and split once into two parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, Subset

from credo.core.network.inputs import AnyInputs, Forward, Inputs, Target, read_batches, split_batch
from credo.data import Batches, Split

Pairs = list[tuple[AnyInputs, Tensor]]
# Fewer held-out rows than this all choose, and the report is cross-fitted; of more a third reports.
LEAST_FOR_REPORT = 150
REPORT_PART = 3
# Held out of the training rows where no others are given: a tenth, and more of few rows.
HELD_OUT, MOST_HELD_OUT, WANTED = 0.1, 0.2, 100


def held_out_count(rows: int) -> int:
    """How many of the training rows are held out: a tenth, at least 100 where these are no more than a fifth.

    Args:
        rows: Number of all rows.
    """
    return round(min(MOST_HELD_OUT * rows, max(HELD_OUT * rows, WANTED)))


def held_out(train: Any, seed: int, batch_size: int = 64) -> tuple[Any, list[Any]]:
    """Training batches without some rows, and batches of these rows; raises ValueError if that is not possible.

    Args:
        train: `Batches`, a `DataLoader` of a data set with a length, such a data set, a `Split`, or a list of batches.
        seed: Seed of the choice.
        batch_size: Of a data set or split that has no batches.
    """
    train = as_loader(train, seed, batch_size)
    if isinstance(train, Batches):
        return _of_split(train, seed)
    if isinstance(train, DataLoader):
        return _of_loader(train, seed)
    if isinstance(train, Sequence):
        chosen = _chosen(len(train), max(1, len(train) // 10), seed)
        if len(train) < 5:
            raise ValueError(f"Of {len(train)} training batches none can be held out: {_ADVICE}")
        return [b for i, b in enumerate(train) if i not in chosen], [b for i, b in enumerate(train) if i in chosen]
    raise ValueError(f"No rows can be held out of a {type(train).__name__}: {_ADVICE}")


_ADVICE = "give validation=, batches of rows that are not trained on."


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


def _of_split(train: Batches, seed: int) -> tuple[Batches, list[Any]]:
    if train.world != 1:
        raise ValueError(f"These batches are the shard of one process, of which no rows can be held out: {_ADVICE}")
    chosen = _chosen(len(train.split), held_out_count(len(train.split)), seed)
    mask = torch.tensor([row in chosen for row in range(len(train.split))])
    _check(len(train.split), len(chosen))
    rest = Batches(
        train.split.subset((~mask).nonzero().flatten()),
        batch_size=train.batch_size,
        shuffle=train.shuffle,
        seed=train.seed,
        augment=train.augment,
        drop_last=train.drop_last,
        device=train.device,
    )
    rows = Batches(train.split.subset(mask.nonzero().flatten()), batch_size=512, shuffle=False, device=train.device)
    return rest, list(rows)


def _of_loader(train: DataLoader[Any], seed: int) -> tuple[DataLoader[Any], list[Any]]:
    usual = isinstance(train.sampler, RandomSampler | SequentialSampler) and train.batch_size is not None
    if not (usual and hasattr(train.dataset, "__len__")):
        raise ValueError(f"No rows can be held out of a DataLoader with a sampler of its own: {_ADVICE}")
    total = len(train.dataset)
    chosen = _chosen(total, held_out_count(total), seed)
    _check(total, len(chosen))
    common: dict[str, Any] = {"batch_size": train.batch_size, "collate_fn": train.collate_fn}
    common |= {"num_workers": train.num_workers, "pin_memory": train.pin_memory}
    rest = Subset(train.dataset, [row for row in range(total) if row not in chosen])
    shuffled = isinstance(train.sampler, RandomSampler)
    loader: DataLoader[Any] = DataLoader(rest, shuffle=shuffled, drop_last=train.drop_last, **common)
    return loader, list(DataLoader(Subset(train.dataset, sorted(chosen)), **common))


def _chosen(total: int, count: int, seed: int) -> set[int]:
    return set(torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count].tolist())


def _check(total: int, count: int) -> None:
    if count < 4:
        raise ValueError(f"{total} training rows are too few to hold some out and choose on them: {_ADVICE}")


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
        chosen = _chosen(len(pairs), len(pairs) // REPORT_PART, seed)
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
