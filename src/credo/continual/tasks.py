"""Sequences of tasks: permuted inputs, groups of classes, or a list of data sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from credo.data import Dataset, Split

Splits = tuple[Split, Split]


@dataclass(frozen=True)
class Task:
    """One task of a sequence.

    Attributes:
        name: Shown in progress bars and results.
        load: Returns the training and test split; called only when they are needed.
        classes: Outputs of the last layer.
        head: Tasks with the same head share the last layer.
    """

    name: str
    load: Callable[[], Splits]
    classes: int
    head: str = "shared"


def permuted_tasks(dataset: Dataset, count: int, *, seed: int = 0) -> list[Task]:
    """Tasks that permute all input entries, each in its own way, including the first (Kirkpatrick et al. 2017).

    All tasks share one head.

    Args:
        dataset: The data, with classes.
        count: Number of tasks.
        seed: Seed of the permutations.
    """
    _check_count(count)
    classes = _classes(dataset)
    entries = dataset.test.x[0].numel()
    orders = [torch.randperm(entries, generator=torch.Generator().manual_seed(seed * 1000 + i)) for i in range(count)]
    return [Task(f"permutation {i + 1}", partial(_permuted, dataset, order), classes) for i, order in enumerate(orders)]


def split_tasks(dataset: Dataset, count: int, *, heads: str = "multi") -> list[Task]:
    """Tasks of consecutive classes in groups of equal size: 0 and 1, 2 and 3, … (Zenke et al. 2017).

    Args:
        dataset: The data, with classes.
        count: Number of groups.
        heads: `"multi"`: every task has its own last layer with labels within the group, and the task of an input is
            known. `"single"`: one last layer for all classes.
    """
    _check_count(count)
    classes = _classes(dataset)
    if heads not in ("multi", "single"):
        raise ValueError(f"heads={heads!r}: possible are multi and single.")
    if classes % count:
        raise ValueError(f"{classes} classes cannot be divided into {count} groups of equal size.")
    size = classes // count
    tasks = []
    for first in range(0, classes, size):
        name = f"classes {first}–{first + size - 1}" if size > 1 else f"class {first}"
        own = heads == "multi"
        load = partial(_grouped, dataset, first, size, relabel=own)
        tasks.append(Task(name, load, size if own else classes, name if own else "shared"))
    return tasks


def tasks_of(datasets: Sequence[Dataset], *, heads: str = "multi") -> list[Task]:
    """One task per data set; with `heads="single"` they must have the same number of classes."""
    if heads not in ("multi", "single"):
        raise ValueError(f"heads={heads!r}: possible are multi and single.")
    shapes = {dataset.input_shape for dataset in datasets}
    if len(shapes) != 1:
        raise ValueError(f"Inputs have different shapes, {sorted(shapes)}: one network must take all of them.")
    counts = {_classes(dataset) for dataset in datasets}
    if heads == "single" and len(counts) != 1:
        raise ValueError(f"One head for {sorted(counts)} classes is not possible; use heads='multi'.")
    names = [
        d.name if [x.name for x in datasets].count(d.name) == 1 else f"{d.name} {i}" for i, d in enumerate(datasets, 1)
    ]
    return [
        Task(name, partial(_whole, dataset), _classes(dataset), name if heads == "multi" else "shared")
        for name, dataset in zip(names, datasets, strict=True)
    ]


def _permuted(dataset: Dataset, order: torch.Tensor) -> Splits:
    train, test = (Split(s.x.flatten(1)[:, order].reshape(s.x.shape), s.y) for s in (dataset.train, dataset.test))
    return train, test


def _grouped(dataset: Dataset, first: int, size: int, *, relabel: bool) -> Splits:
    def part(split: Split) -> Split:
        chosen = split.subset(((split.y >= first) & (split.y < first + size)).nonzero().flatten())
        return Split(chosen.x, chosen.y - first) if relabel else chosen

    return part(dataset.train), part(dataset.test)


def _whole(dataset: Dataset) -> Splits:
    return dataset.train, dataset.test


def _classes(dataset: Dataset) -> int:
    if dataset.classes is None:
        raise ValueError(f"{dataset.name} is a regression; tasks need classes.")
    return dataset.classes


def _check_count(count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count={count!r} must be a number of tasks, 1 or more.")
