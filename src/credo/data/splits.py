"""Data sets in memory: splits, their metadata, and held-out validation data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from credo.data.tables.columns import Columns

Task = Literal["classification", "regression"]


@dataclass(frozen=True, eq=False)
class Split:
    """Inputs `x [n, ...]` with their `y`: labels `int64 [n]`, or targets `float32 [n, outputs]`.

    Images stay `uint8 [n, channels, height, width]`, a quarter of the memory of floats; `Batches` converts them to
    floats in [0, 1]. Everything else is float32.
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"x has {len(self.x)} examples and y has {len(self.y)}: they must have the same length")

    def __len__(self) -> int:
        return len(self.x)

    def subset(self, indices: Tensor | Sequence[int]) -> Split:
        """Return a copy of the chosen examples, in the order of `indices`."""
        index = torch.as_tensor(indices, dtype=torch.long, device=self.x.device)
        return Split(self.x[index], self.y[index.to(self.y.device)])


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test split with their metadata.

    Tables are standardised with statistics of the training split: a prediction `p` is `p * target_std + target_mean` in
    the table's units, a new row enters the model as `(row - input_mean) / input_std`. These four are float64, and so
    must be what they are applied to, since a column may lie far from zero. `classes` is None for regression; `columns`
    describes how cells of a table become inputs. `validation` are examples that the data themselves set aside for it.
    """

    name: str
    train: Split
    test: Split
    classes: int | None
    target_mean: Tensor | None = None
    target_std: Tensor | None = None
    input_mean: Tensor | None = None
    input_std: Tensor | None = None
    class_names: tuple[str, ...] | None = None
    columns: Columns | None = None
    validation: Split | None = None

    @property
    def input_names(self) -> tuple[str, ...] | None:
        """Names of the inputs, for a table with a header or with categories."""
        columns = self.columns
        if columns is None or not (columns.has_header or any(c.categories for c in columns.inputs)):
            return None
        return columns.input_names

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example, without the batch dimension."""
        return tuple(self.test.x.shape[1:])

    @property
    def task(self) -> Task:
        """Whether a class or a number is predicted."""
        return "regression" if self.classes is None else "classification"


def split_validation(split: Split, *, size: int | float, seed: int, stratify: bool = False) -> tuple[Split, Split]:
    """Split into (train, validation), disjoint and each in the original order.

    Args:
        split: All examples.
        size: Validation examples, as a number (int) or a fraction (float).
        seed: Seed of the choice.
        stratify: Keep the class fractions, rounded so that the total is exact.
    """
    count = _validation_count(len(split), size)
    generator = torch.Generator().manual_seed(seed)
    held_out = (
        _stratified(split.y, count, generator) if stratify else torch.randperm(len(split), generator=generator)[:count]
    )
    mask = torch.zeros(len(split), dtype=torch.bool)
    mask[held_out] = True
    return split.subset((~mask).nonzero().flatten()), split.subset(mask.nonzero().flatten())


def _validation_count(total: int, size: int | float) -> int:
    count = size if isinstance(size, int) else round(size * total) if 0 < size < 1 else 0
    if isinstance(size, bool) or not 0 < count < total:
        raise ValueError(
            f"size={size!r} leaves nothing on one side of {total} examples: "
            f"give a count from 1 to {total - 1}, or a fraction between 0 and 1 that rounds to one"
        )
    return count


def _stratified(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return the indices of `count` examples, stratified by largest remainders."""
    if labels.is_floating_point():
        raise ValueError("stratify=True needs class labels; these are regression targets")
    classes, class_of, sizes = labels.cpu().unique(return_inverse=True, return_counts=True)
    exact = sizes * count  # in units of 1/n: integer arithmetic, so ties do not depend on rounding
    quotas = exact // len(labels)
    remainders = exact % len(labels)
    fullest = remainders.argsort(descending=True, stable=True)[: count - int(quotas.sum())]
    quotas[fullest] += 1
    order = torch.randperm(len(labels), generator=generator)
    return torch.cat([order[class_of[order] == k][: int(quotas[k])] for k in range(len(classes))])
