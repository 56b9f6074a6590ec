"""Hold some rows of a loader out: training batches without them, and batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Divided:
    """Batches of all rows, of which it is known which are held out: `hold_out` chooses none.

    Attributes:
        whole: Batches of all rows.
        rest: Batches without the held-out rows.
        rows: Batches of the held-out rows.
    """

    whole: Any
    rest: Any
    rows: Sequence[Any]

    def __iter__(self) -> Iterator[Any]:
        """Batches of all rows."""
        return iter(self.whole)

    def __len__(self) -> int:
        """Their number."""
        return len(self.whole)


def hold_out(loader: Any, seed: int, wanted: int = WANTED, part: float | None = None) -> tuple[Any, Iterable[Any]]:
    """Training batches without some rows, and batches of these rows; raises ValueError if that is not possible.

    Whole batches of a list are held out, a tenth of them or `part`.

    Args:
        loader: `Batches`, a `DataLoader` of a data set with a length, a list of batches, or `Divided` ones.
        seed: Seed of the choice.
        wanted: As in `held_out_count`.
        part: As in `held_out_count`.
    """
    if isinstance(loader, Divided):
        return loader.rest, loader.rows
    return divide(loader, choose(loader, seed, wanted, part))


def choose(loader: Any, seed: int, wanted: int = WANTED, part: float | None = None) -> set[int]:
    """Which rows `hold_out` holds out, or which batches of a list.

    Args:
        loader: As in `hold_out`.
        seed: As in `hold_out`.
        wanted: As in `hold_out`.
        part: As in `hold_out`.
    """
    if isinstance(loader, Batches):
        if loader.world != 1:
            raise ValueError(f"These batches are the shard of one process, of which no rows can be held out: {_ADVICE}")
        return _chosen_rows_of(loader.split, seed, wanted, part)
    if isinstance(loader, DataLoader):
        usual = isinstance(loader.sampler, RandomSampler | SequentialSampler) and loader.batch_size is not None
        if not (usual and isinstance(loader.dataset, Sized)):
            raise ValueError(f"No rows can be held out of a DataLoader with a sampler of its own: {_ADVICE}")
        return _chosen_rows_of(loader.dataset, seed, wanted, part)
    if isinstance(loader, Sequence):
        if len(loader) < 5:
            raise ValueError(f"Of {len(loader)} training batches none can be held out: {_ADVICE}")
        return chosen_rows(len(loader), max(1, len(loader) // 10 if part is None else round(part * len(loader))), seed)
    raise ValueError(f"No rows can be held out of a {type(loader).__name__}: {_ADVICE}")


def divide(loader: Any, chosen: AbstractSet[int]) -> tuple[Any, Iterable[Any]]:
    """Batches without the chosen rows, and batches of these rows in their order.

    Args:
        loader: As in `hold_out`.
        chosen: Indices of rows, of a list those of batches.
    """
    if isinstance(loader, Batches):
        return _of_split(loader, chosen)
    if isinstance(loader, DataLoader):
        return _of_loader(loader, chosen)
    return [b for i, b in enumerate(loader) if i not in chosen], [b for i, b in enumerate(loader) if i in chosen]


def _of_split(train: Batches, chosen: AbstractSet[int]) -> tuple[Batches, Batches]:
    mask = torch.tensor([row in chosen for row in range(len(train.split))])
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


def _of_loader(train: DataLoader[Any], chosen: AbstractSet[int]) -> tuple[DataLoader[Any], DataLoader[Any]]:
    common: dict[str, Any] = {"batch_size": train.batch_size, "collate_fn": train.collate_fn}
    common |= {"num_workers": train.num_workers, "pin_memory": train.pin_memory}
    rest = Subset(train.dataset, [row for row in range(len(train.dataset)) if row not in chosen])  # type: ignore[arg-type]
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


def _chosen_rows_of(rows: Sized, seed: int, wanted: int, part: float | None) -> set[int]:
    count = held_out_count(len(rows), wanted, part)
    if count < 4:
        raise ValueError(f"{len(rows)} training rows are too few to hold some out and choose on them: {_ADVICE}")
    return chosen_rows(len(rows), count, seed)
