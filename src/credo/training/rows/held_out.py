"""Hold some rows of a loader out: training batches without them, and batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset

from credo.data import Batches

# A tenth of the rows, and more of few rows where so many are wanted.
HELD_OUT, MOST_HELD_OUT, WANTED = 0.1, 0.2, 100
_ADVICE = "give validation=, batches of rows that are not trained on."


def held_out_count(rows: int, wanted: int = WANTED, part: float | None = None) -> int:
    """How many of the training rows are held out: a tenth, at least `wanted` where these are no more than a fifth.

    Args:
        rows: Number of all rows.
        wanted: Number of rows to hold out of few.
        part: This part of them instead.
    """
    if part is not None:
        return round(part * rows)
    return round(min(MOST_HELD_OUT * rows, max(HELD_OUT * rows, wanted)))


def hold_out(loader: Any, seed: int, wanted: int = WANTED, part: float | None = None) -> tuple[Any, Iterable[Any]]:
    """Training batches without some rows, and batches of these rows; raises ValueError if that is not possible.

    Whole batches of a list are held out, a tenth of them or `part`.

    Args:
        loader: `Batches`, a `DataLoader` of a data set with a length, or a list of batches.
        seed: Seed of the choice.
        wanted: As in `held_out_count`.
        part: As in `held_out_count`.
    """
    if isinstance(loader, Batches):
        return _of_split(loader, seed, held_out_count(len(loader.split), wanted, part))
    if isinstance(loader, DataLoader):
        return _of_loader(loader, seed, wanted, part)
    if isinstance(loader, Sequence):
        count = len(loader) // 10 if part is None else round(part * len(loader))
        chosen = chosen_rows(len(loader), max(1, count), seed)
        if len(loader) < 5:
            raise ValueError(f"Of {len(loader)} training batches none can be held out: {_ADVICE}")
        return [b for i, b in enumerate(loader) if i not in chosen], [b for i, b in enumerate(loader) if i in chosen]
    raise ValueError(f"No rows can be held out of a {type(loader).__name__}: {_ADVICE}")


def _of_split(train: Batches, seed: int, count: int) -> tuple[Batches, Batches]:
    if train.world != 1:
        raise ValueError(f"These batches are the shard of one process, of which no rows can be held out: {_ADVICE}")
    chosen = chosen_rows(len(train.split), count, seed)
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
    return rest, rows


def _of_loader(
    train: DataLoader[Any], seed: int, wanted: int, part: float | None
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    usual = isinstance(train.sampler, RandomSampler | SequentialSampler) and train.batch_size is not None
    if not (usual and hasattr(train.dataset, "__len__")):
        raise ValueError(f"No rows can be held out of a DataLoader with a sampler of its own: {_ADVICE}")
    total = len(train.dataset)
    chosen = chosen_rows(total, held_out_count(total, wanted, part), seed)
    _check(total, len(chosen))
    common: dict[str, Any] = {"batch_size": train.batch_size, "collate_fn": train.collate_fn}
    common |= {"num_workers": train.num_workers, "pin_memory": train.pin_memory}
    rest = Subset(train.dataset, [row for row in range(total) if row not in chosen])
    shuffled = isinstance(train.sampler, RandomSampler)
    loader: DataLoader[Any] = DataLoader(rest, shuffle=shuffled, drop_last=train.drop_last, **common)
    return loader, DataLoader(Subset(train.dataset, sorted(chosen)), **common)


def chosen_rows(total: int, count: int, seed: int) -> set[int]:
    """Indices of rows at random.

    Args:
        total: Number of all rows.
        count: Number of rows to choose.
        seed: Seed of the choice.
    """
    return set(torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count].tolist())


def _check(total: int, count: int) -> None:
    if count < 4:
        raise ValueError(f"{total} training rows are too few to hold some out and choose on them: {_ADVICE}")
