"""Tables of numbers in a text file: one example a row, one column the target."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from credo.data.errors import DataMissingError
from credo.data.splits import Dataset, Split, Task, split_validation

_GAPS = ("", "nan", "na", "n/a", "null", "?")


def load_csv(
    *,
    path: str | Path,
    target: str | int = -1,
    test_fraction: float = 0.1,
    seed: int = 0,
    task: Task = "regression",
    header: bool | None = None,
    delimiter: str | None = None,
) -> Dataset:
    """A table split at random into train and test, standardised with the statistics of the training rows alone.

    `target` is a column's name or index. A first row without any number is taken for a header unless `header` says
    otherwise; the delimiter (comma, semicolon, tab or spaces) is guessed from the first line. For classification the
    target's distinct values are the classes (`class_names`, sorted), and the split is stratified.
    """
    if task not in ("regression", "classification"):
        raise ValueError(f"task={task!r}: possible are 'regression' and 'classification'")
    path = Path(path).expanduser()
    table = read_table(path, header=header, delimiter=delimiter)
    count = len(table.rows)
    if count < 2:
        raise ValueError(f"{path} has {count} rows of data: at least 2 are needed, one to train and one to test")
    column = _column_index(table, target)
    others = [i for i in range(len(table.columns)) if i != column]
    inputs = table.numbers(others)
    input_names = tuple(table.columns[i] for i in others) if table.has_header else None
    if inputs.shape[1] == 0:
        raise ValueError(f"{path} has one column, the target: at least one input column is needed")
    if task == "regression":
        whole = Split(inputs, table.numbers([column]))
        dataset = _standardise(path.stem, *split_validation(whole, size=test_fraction, seed=seed))
        return replace(dataset, input_names=input_names)
    names, labels = _labels(table.labels(column))
    parts = split_validation(Split(inputs, labels), size=test_fraction, seed=seed, stratify=True)
    return replace(_standardise(path.stem, *parts, class_names=names), input_names=input_names)


@dataclass(frozen=True)
class Table:
    """Cells as text with the line that each row stands on, so that a complaint can name the place."""

    path: Path
    columns: tuple[str, ...]
    rows: list[tuple[int, list[str]]]
    has_header: bool

    def numbers(self, columns: list[int], *, gaps: bool = False) -> Tensor:
        """Chosen columns as `float64 [rows, columns]`; with `gaps`, cells without a finite number are NaN."""
        values = [[self._number(line, row[i], i, gaps) for i in columns] for line, row in self.rows]
        return torch.tensor(values, dtype=torch.float64).reshape(len(self.rows), len(columns))

    def labels(self, column: int) -> list[str]:
        """One column as text, which must not have gaps."""
        for line, row in self.rows:
            if row[column].lower() in _GAPS:
                raise ValueError(
                    f"{self.path}, row {line}, column {self.columns[column]!r}: {row[column]!r} is not a class label"
                )
        return [row[column] for _, row in self.rows]

    def _number(self, line: int, cell: str, column: int, gaps: bool) -> float:
        value = _as_number(cell)
        if gaps and (cell.lower() in _GAPS or (value is not None and not math.isfinite(value))):
            return math.nan
        if value is None or not math.isfinite(value):
            raise ValueError(
                f"{self.path}, row {line}, column {self.columns[column]!r}: {cell!r} is not a finite number. "
                "Remove the row, fill the gap, or turn categories into numbers"
            )
        return value


def read_table(path: Path, *, header: bool | None = None, delimiter: str | None = None) -> Table:
    """The file's cells, stripped; blank lines are skipped, ragged rows refused. Rows count from 1 as in an editor."""
    if not path.is_file():
        raise DataMissingError(f"there is no file {path}: give the table's path as path=...")
    with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets put a byte-order mark in front
        rows = _rows(list(file), delimiter)
    if header is None and rows:
        header = all(_as_number(cell) is None for cell in rows[0][1])
    names = rows.pop(0)[1] if header and rows else [str(i) for i in range(len(rows[0][1]))] if rows else []
    for line, row in rows:
        if len(row) != len(names):
            raise ValueError(f"{path}, row {line} has {len(row)} cells where the first row has {len(names)}")
    return Table(path, tuple(names), rows, bool(header))


def _rows(lines: list[str], delimiter: str | None) -> list[tuple[int, list[str]]]:
    first = next((line for line in lines if line.strip()), "")
    delimiter = delimiter or next((mark for mark in (";", "\t", ",") if mark in first), None)
    if delimiter is None:  # columns padded with spaces, as many of the older public tables are
        return [(number, line.split()) for number, line in enumerate(lines, start=1) if line.strip()]
    reader = csv.reader(lines, delimiter=delimiter)
    rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    return [(number, row) for number, row in rows if any(row)]


def _as_number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _column_index(table: Table, target: str | int) -> int:
    if isinstance(target, str) and target in table.columns:
        return table.columns.index(target)
    count = len(table.columns)
    try:
        index = int(target)
    except ValueError:
        index = count
    if not -count <= index < count:
        raise ValueError(
            f"{table.path} has no column {target!r}: columns are {', '.join(table.columns)}, "
            f"or an index from 0 to {count - 1} (negative ones count from the end)"
        )
    return index % count


def _labels(cells: list[str]) -> tuple[tuple[str, ...], Tensor]:
    numbers = {cell: _as_number(cell) for cell in cells}
    numeric = all(value is not None for value in numbers.values())
    # By value, so that "10" comes after "9", and "1" and "1.0" are one class.
    keys = {cell: (value or 0.0, "") if numeric else (0.0, cell) for cell, value in numbers.items()}
    order = {key: i for i, key in enumerate(sorted(set(keys.values())))}
    names = {order[keys[cell]]: cell for cell in reversed(cells)}
    return tuple(names[i] for i in range(len(order))), torch.tensor([order[keys[cell]] for cell in cells])


def _standardise(name: str, train: Split, test: Split, class_names: tuple[str, ...] | None = None) -> Dataset:
    mean, std = _moments(train.x)
    x_train, x_test = ((part.x - mean) / std for part in (train, test))
    if class_names is not None:
        splits = Split(x_train.float(), train.y), Split(x_test.float(), test.y)
        return Dataset(
            name,
            *splits,
            classes=len(class_names),
            input_mean=mean.float(),
            input_std=std.float(),
            class_names=class_names,
        )
    y_mean, y_std = _moments(train.y)
    y_train, y_test = ((part.y - y_mean) / y_std for part in (train, test))
    return Dataset(
        name,
        Split(x_train.float(), y_train.float()),
        Split(x_test.float(), y_test.float()),
        classes=None,
        target_mean=y_mean.float(),
        target_std=y_std.float(),
        input_mean=mean.float(),
        input_std=std.float(),
    )


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    std, mean = torch.std_mean(values, dim=0, correction=0)
    # A constant column has rounding noise for a standard deviation; dividing by it would blow up the test rows.
    constant = (values == values[0]).all(dim=0)
    return torch.where(constant, values[0], mean), torch.where(constant, torch.ones_like(std), std)
