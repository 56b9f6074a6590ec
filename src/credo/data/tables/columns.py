"""Input columns of a table: numbers or categories, and how cells become inputs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Categories = Literal["auto", "raise"]
Gaps = Literal["raise", "mean"]
Standardise = Literal["all", "inputs"]
GAPS = ("", "nan", "na", "n/a", "null", "?")
# So many different texts are categories even in a short table.
_FEW = 10


class Cell(NamedTuple):
    """One cell of a table, with its position for messages; rows count from 1 as in an editor."""

    text: str
    row: int
    column: str
    path: Path

    @property
    def shown(self) -> str:
        """The text for messages, shortened."""
        return repr(self.text if len(self.text) <= 40 else f"{self.text[:40]}…")

    @property
    def place(self) -> str:
        """Position: "table.csv, row 3, column 'size'"."""
        return f"{self.path}, row {self.row}, column {self.column!r}"

    @property
    def is_gap(self) -> bool:
        """Whether there is no value: empty, nan, NA, n/a, null or ?."""
        return self.text.lower() in GAPS

    @property
    def number(self) -> float | None:
        """The cell as a number, if it is one."""
        return as_number(self.text)


@dataclass(frozen=True)
class Column:
    """One input column; `categories` are those of the training table, or None for a column of numbers."""

    name: str
    categories: tuple[str, ...] | None = None

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the network's inputs: the column's own, or `color=red` and so on, one for each category."""
        return (self.name,) if self.categories is None else tuple(f"{self.name}={value}" for value in self.categories)

    def values(self, cell: Cell, gaps: Gaps, *, mark: bool = False) -> list[float]:
        """Return the inputs for a cell; NaN for a gap that is filled later, infinite (with `mark`) for other gaps.

        Args:
            cell: A cell of this column.
            gaps: How to treat cells without a value.
            mark: Mark gaps and non-finite numbers as infinite instead of raising.
        """
        if cell.is_gap and gaps == "mean":
            return [math.nan] * len(self.input_names)
        if mark and (cell.is_gap or (cell.number is not None and not math.isfinite(cell.number))):
            return [math.inf] * len(self.input_names)
        if self.categories is None:
            return [self._number(cell)]
        if cell.text not in self.categories:
            what = "is a gap" if cell.is_gap else "is not a category of the training table"
            hint = f", or train with {_FILLED}" if cell.is_gap else ""
            raise ValueError(
                f"{cell.place}: {cell.shown} {what}. Known are {', '.join(self.categories)}. Correct the cell or "
                f"remove the row{hint}"
            )
        return [float(cell.text == value) for value in self.categories]

    def _number(self, cell: Cell) -> float:
        value = cell.number
        if value is None or not math.isfinite(value):
            hint = f"fill the gap, or train with {_FILLED}" if cell.is_gap else "or correct the cell"
            raise ValueError(f"{cell.place}: {cell.shown} is not a finite number. Remove the row, {hint}")
        return value


_FILLED = (
    "data.gaps=mean, which takes the mean of the training rows (`credo predict --on-nonfinite mark` skips the row)"
)


@dataclass(frozen=True)
class Columns:
    """A table's input columns in the order of training; encodes the rows of new tables.

    Args:
        inputs: The columns, with their categories if they hold text.
        target: Name of the predicted column, or names of several; None for a table without a header.
        gaps: Cells without a value raise ("raise"), or are NaN until they are filled ("mean").
        dropped: Columns of the training table that are left out, with their positions among those that are no targets.
    """

    inputs: tuple[Column, ...]
    target: str | tuple[str, ...] | None
    gaps: Gaps
    dropped: tuple[tuple[int, str], ...] = ()

    @property
    def has_header(self) -> bool:
        """Whether the table has column names; else columns are named by their index."""
        return self.target is not None

    @property
    def target_names(self) -> tuple[str, ...]:
        """Names of the predicted columns; none without a header."""
        return (self.target,) if isinstance(self.target, str) else self.target or ()

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names in the table."""
        return tuple(column.name for column in self.inputs)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the network's inputs; a column of text has one per category."""
        return tuple(name for column in self.inputs for name in column.input_names)

    @property
    def is_number(self) -> Tensor:
        """Which of the network's inputs are numbers, `bool [inputs]`; the others are 0 or 1."""
        return torch.tensor([column.categories is None for column in self.inputs for _ in column.input_names])

    def encode(self, cells: Sequence[Sequence[Cell]], *, mark: bool = False) -> Tensor:
        """Return rows of cells, in the order of `inputs`, as `float64 [rows, inputs]`.

        Args:
            cells: Row by row.
            mark: Mark gaps that are not filled as infinite instead of raising.
        """
        rows = [
            [
                v
                for column, cell in zip(self.inputs, row, strict=True)
                for v in column.values(cell, self.gaps, mark=mark)
            ]
            for row in cells
        ]
        return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(self.input_names))

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, for the file of a trained model."""
        inputs = [{"name": c.name, "categories": c.categories and list(c.categories)} for c in self.inputs]
        target = list(self.target) if isinstance(self.target, tuple) else self.target
        return {"inputs": inputs, "target": target, "gaps": self.gaps, "dropped": [list(each) for each in self.dropped]}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Columns:
        """Invert `to_dict`."""
        inputs = tuple(Column(c["name"], c["categories"] and tuple(c["categories"])) for c in found["inputs"])
        target = tuple(found["target"]) if isinstance(found["target"], list) else found["target"]
        dropped = tuple((index, name) for index, name in found.get("dropped", ()))  # not in runs of 0.1
        return cls(inputs, target, found["gaps"], dropped)


def make_column(name: str, cells: Sequence[Cell], categories: Categories) -> Column:
    """Return a column of the training table: numbers if any cell is one, else sorted categories.

    Args:
        name: Name of the column.
        cells: Its cells.
        categories: Whether text is allowed.
    """
    texts = Counter(cell.text for cell in cells if not cell.is_gap)
    if not texts or any(as_number(text) is not None for text in texts):
        _check_mixed(cells, texts)
        return Column(name)
    first = next(cell for cell in cells if not cell.is_gap)
    if categories == "raise":
        raise ValueError(
            f"{first.place}: {first.shown} is not a finite number. Turn categories into numbers, or set "
            "data.categories=auto"
        )
    if len(texts) > max(_FEW, len(cells) // 2):
        raise ValueError(
            f"{first.place} and below: {len(texts)} different texts in {len(cells)} rows ({first.shown}, …) are names "
            f"or identifiers rather than categories: nothing can be learned from them. {left_out(name)}"
        )
    return Column(name, tuple(sorted(texts)))


def left_out(name: str) -> str:
    """The advice to leave a column out.

    Args:
        name: Name of the column.
    """
    return f"Leave the column out by data.drop={json.dumps([name], ensure_ascii=False)}"


def _check_mixed(cells: Iterable[Cell], texts: Mapping[str, int]) -> None:
    """Raise if text is among numbers: it is more often a mistake than a category."""
    wrong = next((cell for cell in cells if not cell.is_gap and cell.number is None), None)
    if wrong is not None:
        count = sum(times for text, times in texts.items() if as_number(text) is not None)
        raise ValueError(
            f"{wrong.place}: {wrong.shown} is not a finite number, while {count} other cells of the column are. "
            "Correct it or remove the row; for categories, write all of them as text (grade3 for 3)"
        )


def as_number(text: str) -> float | None:
    """Return the text as a number, None if it is not one."""
    try:
        return float(text)
    except ValueError:
        return None


def standardised(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return (values − mean)/std as float32, computed in float64; a gap (NaN) becomes 0, the mean.

    In float32 a column such as 1.7e9 ± 17 would be lost: there it has steps of 128.
    """
    values = values.double()
    return torch.where(values.isnan(), 0.0, (values - mean.double()) / std.double()).float()
