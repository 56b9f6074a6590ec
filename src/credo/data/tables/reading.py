"""Read tables from text files: one example per row, one column is the target, the others numbers or categories."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from credo.core.errors import DataWarning
from credo.core.support.input_scale import input_scale
from credo.core.support.user_warnings import warn
from credo.data.errors import DataCorruptError, DataMissingError
from credo.data.splits import Dataset, Split, Task, split_validation
from credo.data.tables.columns import (
    Categories,
    Cell,
    Column,
    Columns,
    Gaps,
    Standardise,
    as_number,
    left_out,
    make_column,
    standardised,
)
from credo.data.tables.targets import TableTask, make_targets, several_targets

_CHOICES = {"task": ("auto", *get_args(Task)), "categories": get_args(Categories), "gaps": get_args(Gaps)} | {
    "standardise": get_args(Standardise)
}


def load_csv(
    *,
    path: str | Path,
    target: str | int | Sequence[str | int] = -1,
    drop: str | int | Sequence[str | int] = (),
    test_fraction: float = 0.1,
    seed: int = 0,
    task: TableTask = "auto",
    categories: Categories = "auto",
    gaps: Gaps = "raise",
    header: bool | None = None,
    delimiter: str | None = None,
    standardise: Standardise = "all",
) -> Dataset:
    """Load a table, split it at random and standardise it with statistics of the training rows.

    Means and scales are float64, so columns may lie far from zero: 1.7e9 ± 17 seconds keep their digits.

    Args:
        path: The file, in UTF-8.
        target: Name or index of the predicted column; the last by default. A list of several: a regression with an
            output for each, or what the likelihood makes of them (several labels; a time and whether it was observed).
        drop: Name or index of a column that is left out, such as a row's number, or a list of several.
        test_fraction: Fraction of the rows for the test split.
        seed: Seed of the split.
        task: "classification" uses the target's distinct values as classes (`class_names`, sorted) and stratifies the
            split; "auto" does so if the target is text or has two whole numbers, such as 0 and 1; other numbers are a
            regression.
        categories: "auto" one-hot encodes an input column of text, with names `column=category`; these inputs are
            centred but not scaled, since a rare category would get a huge value. "raise" makes text an error. Text
            among numbers always raises.
        gaps: An empty cell, nan, NA, n/a, null or ? in an input column raises ("raise", so that filling is a decision),
            or gets the mean of the training rows ("mean"), for a category the frequencies of the categories. A gap in
            the target always raises.
        header: Whether the first row holds names; by default if none of its cells is a number.
        delimiter: By default a comma, semicolon, tab or spaces, guessed from the first line.
        standardise: "all", or "inputs" to leave the targets of a regression as they are, such as counts.
    """
    chosen = {"task": task, "categories": categories, "gaps": gaps, "standardise": standardise}
    for name, value in chosen.items():
        if value not in _CHOICES[name]:
            raise ValueError(f"{name}={value!r}: possible are {', '.join(map(repr, _CHOICES[name]))}")
    path = Path(path).expanduser()
    table = read_table(path, header=header, delimiter=delimiter)
    count = len(table.rows)
    if count < 2:
        raise ValueError(f"{path} has {count} rows of data: at least 2 are needed, one to train and one to test")
    chosen_columns = _column_indices(table, target)
    dropped = _dropped_indices(table, drop, chosen_columns)
    others = [i for i in range(len(table.columns)) if i not in chosen_columns and i not in dropped]
    if not others:
        what = "one column, the target" if len(table.columns) == 1 else "no column that is not a target"
        what += ", or dropped" if dropped else ""
        raise ValueError(f"{path} has {what}: at least one input column is needed")
    if header is None:
        _check_header(table)
    inputs = tuple(make_column(table.columns[i], table.column(i), categories) for i in others)
    is_one = isinstance(target, str | int)
    called = table.columns[chosen_columns[0]] if is_one else tuple(table.columns[i] for i in chosen_columns)
    omitted = tuple((i - sum(index < i for index in chosen_columns), table.columns[i]) for i in dropped)
    columns = Columns(inputs, called if table.has_header else None, gaps, omitted)
    x = columns.encode(table.cells(others))
    cells = [table.column(i) for i in chosen_columns]
    names, y = make_targets(cells[0], task) if is_one else (None, several_targets(cells, task))
    train, test = split_validation(Split(x, y), size=test_fraction, seed=seed, stratify=names is not None)
    _check_seen(columns, train.x, test.x)
    return _checked(_standardise(path, train, test, columns, names, standardise == "all"), path)


@dataclass(frozen=True)
class Table:
    """Cells as text, with the line of each row for messages."""

    path: Path
    columns: tuple[str, ...]
    rows: list[tuple[int, list[str]]]
    has_header: bool

    def cells(self, columns: Sequence[int]) -> list[list[Cell]]:
        """Return chosen columns, row by row."""
        names = [self.columns[i] for i in columns]
        return [
            [Cell(row[i], line, name, self.path) for i, name in zip(columns, names, strict=True)]
            for line, row in self.rows
        ]

    def column(self, index: int) -> list[Cell]:
        """Return one column from top to bottom."""
        return [cell for (cell,) in self.cells([index])]

    def numbers(self, *, mark: bool = False) -> Tensor:
        """Return all columns as `float64 [rows, columns]`; other cells raise, or are infinite with `mark`."""
        columns = Columns(tuple(Column(name) for name in self.columns), None, "raise")
        return columns.encode(self.cells(range(len(self.columns))), mark=mark)


def read_table(
    path: Path,
    *,
    header: bool | None = None,
    delimiter: str | None = None,
    names: Collection[str] = (),
    lines: list[str] | None = None,
) -> Table:
    """Read the file's cells, stripped; blank lines are skipped, rows of different lengths raise.

    Args:
        path: The file, in UTF-8.
        header: Whether the first row holds names; by default if none of its cells is a number.
        delimiter: By default guessed from the first line.
        names: Without `header`, a first row that contains all of these is a header, too: names may be numbers.
        lines: The lines of a table that is in no file; `path` is then what messages call it.
    """
    if lines is None and not path.is_file():
        raise DataMissingError(f"there is no file {path}: give the path of a table")
    try:
        if lines is None:
            with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte-order mark
                lines = list(file)
        rows = _rows(lines, delimiter)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataCorruptError(
            f"{path} cannot be read as a table of text: {error}. Tables are CSV files in UTF-8; save it as one."
        ) from error
    if header is None and rows:
        first = rows[0][1]
        header = all(as_number(cell) is None for cell in first) or (bool(names) and set(names) <= set(first))
    titles = rows.pop(0)[1] if header and rows else [str(i) for i in range(len(rows[0][1]))] if rows else []
    for line, row in rows:
        if len(row) != len(titles):
            raise ValueError(f"{path}, row {line} has {len(row)} cells where the first row has {len(titles)}")
    return Table(path, tuple(titles), rows, bool(header))


def _rows(lines: list[str], delimiter: str | None) -> list[tuple[int, list[str]]]:
    first = next((line for line in lines if line.strip()), "")
    delimiter = delimiter or next((mark for mark in (";", "\t", ",") if mark in first), None)
    if delimiter is None:  # columns padded with spaces, as in many older public tables
        return [(number, line.split()) for number, line in enumerate(lines, start=1) if line.strip()]
    reader = csv.reader(lines, delimiter=delimiter)
    rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    return [(number, row) for number, row in rows if any(row)]


def _column_indices(table: Table, target: str | int | Sequence[str | int]) -> list[int]:
    """The indices of the predicted columns, in the order in which they are given."""
    if isinstance(target, str | int):
        return [_column_index(table, target)]
    found = [_column_index(table, one) for one in target]
    if not found or len(set(found)) < len(found):
        raise ValueError(f"target={list(target)!r:.80}: name at least one column, and each of them once")
    return found


def _dropped_indices(table: Table, drop: str | int | Sequence[str | int], targets: Collection[int]) -> list[int]:
    """The indices of the columns that are left out, in the order of the table."""
    given = [drop] if isinstance(drop, str | int) else drop
    found = sorted({_column_index(table, one) for one in given})
    both = next((table.columns[index] for index in found if index in targets), None)
    if both is not None:
        raise ValueError(
            f"{table.path}: the column {both!r} is the target and cannot be dropped. The last column is the target "
            "unless data.target names another"
        )
    return found


def _column_index(table: Table, target: str | int) -> int:
    if isinstance(target, str) and target in table.columns:
        return table.columns.index(target)
    count = len(table.columns)
    try:
        index = int(target)
    except ValueError:
        index = count
    if not -count <= index < count:
        near = difflib.get_close_matches(str(target), table.columns, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{table.path} has no column {target!r}: columns are {', '.join(table.columns)}, "
            f"or an index from 0 to {count - 1} (negative ones count from the end).{hint}"
        )
    return index % count


def _check_header(table: Table) -> None:
    """Raise if a table holds text only and words of its first row recur: it is rather an example than a header."""
    columns = [table.column(i) for i in range(len(table.columns))]
    if not table.has_header or any(cell.number is not None for column in columns for cell in column):
        return
    again = [column[0].column for column in columns if any(cell.text == cell.column for cell in column)]
    if again:
        raise ValueError(
            f"{table.path} holds text only, and {', '.join(map(repr, again))} of its first row recurs below: set "
            "data.header=true if that row holds names, data.header=false if it is an example"
        )


def _check_seen(columns: Columns, train: Tensor, test: Tensor) -> None:
    """Warn of categories that only test rows have: their weights are never trained."""
    unseen = ~columns.is_number & ~(train > 0).any(0) & (test > 0).any(0)
    names = [columns.input_names[i] for i in unseen.nonzero().flatten().tolist()]
    if names:
        shown = ", ".join([*names[:5], *(["…"] if len(names) > 5 else [])])
        warn(
            f"{len(names)} categories are in test rows only ({shown}): nothing is learned about them. More rows of "
            "them, a smaller data.test_fraction or another data.seed would help.",
            DataWarning,
        )


def _standardise(
    path: Path, train: Split, test: Split, columns: Columns, class_names: tuple[str, ...] | None, targets: bool
) -> Dataset:
    mean, std = moments(train.x)
    empty = [columns.input_names[i] for i in mean.isnan().nonzero().flatten().tolist()]
    if empty:
        names = [column.name for column in columns.inputs if empty[0] in column.input_names]
        raise ValueError(f"{path}: {', '.join(empty)} has only gaps in the training rows. {left_out(names[0])}")
    farthest = (train.x - mean).abs().nan_to_num(nan=0.0).amax(0)
    std = torch.where(columns.is_number, input_scale(std, farthest), torch.ones_like(std))
    x_train, x_test = (standardised(part.x, mean, std) for part in (train, test))
    y_train, y_test, y_mean, y_std = train.y, test.y, None, None
    if class_names is None and not targets:
        y_train, y_test = train.y.float(), test.y.float()
    elif class_names is None:
        y_mean, y_std = moments(train.y)
        y_train, y_test = (standardised(part.y, y_mean, y_std) for part in (train, test))
    return Dataset(
        path.stem,
        Split(x_train, y_train),
        Split(x_test, y_test),
        classes=None if class_names is None else len(class_names),
        class_names=class_names,
        target_mean=y_mean,
        target_std=y_std,
        input_mean=mean,
        input_std=std,
        columns=columns,
    )


def _checked(dataset: Dataset, path: Path) -> Dataset:
    """Raise ValueError with the column if a standardised number exceeds float32."""
    finite = [(split.x.isfinite().all(0), split.y.isfinite().all()) for split in (dataset.train, dataset.test)]
    wrong = (~(finite[0][0] & finite[1][0])).nonzero().flatten().tolist()
    names = [dataset.input_names[i] if dataset.input_names else f"input {i}" for i in wrong]
    names += [] if finite[0][1] and finite[1][1] else ["the target"]
    if names:
        raise ValueError(
            f"{path}, column {', '.join(names)}: a number lies more than 1e38 standard deviations from the mean of the "
            "training rows, or is too large to subtract it. Remove the row, or take the column's logarithm"
        )
    return dataset


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each column without its gaps; NaN if there is nothing else."""
    if values.isnan().any():
        each = [moments(column[~column.isnan(), None]) for column in values.T]
        return torch.cat([mean for mean, _ in each]), torch.cat([std for _, std in each])
    if len(values) == 0:
        return values.sum(0) * torch.nan, values.sum(0) * torch.nan
    # Scaled near 1, exactly: squares of numbers below 1e-162 are 0, above 1e154 infinite.
    _, exponent = torch.frexp(values.abs().amax(0))
    scale = torch.ldexp(torch.ones_like(values[0]), exponent.clamp(-1000, 1000))
    std, mean = (moment * scale for moment in torch.std_mean(values / scale, dim=0, correction=0))
    # A constant column has rounding noise as standard deviation; dividing by it would blow up test rows.
    constant = (values == values[0]).all(dim=0)
    return torch.where(constant, values[0], mean), torch.where(constant, torch.ones_like(std), std)
