"""The target columns of a table: classes or numbers."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from credo.data.splits import Task
from credo.data.tables.columns import Cell, Column, as_number

TableTask = Task | Literal["auto"]


def make_targets(cells: list[Cell], task: TableTask) -> tuple[tuple[str, ...] | None, Tensor]:
    """Return (class names, labels `int64 [rows]`), or (None, `float64 [rows, 1]`) for regression."""
    if task == "classification" or (task == "auto" and _are_classes(cells)):
        return _labels(cells)
    values = []
    for cell in cells:
        if cell.is_gap:
            raise ValueError(f"{cell.place}: {cell.shown} is not a finite number: a target has no gaps. Remove the row")
        if cell.number is None:
            raise ValueError(
                f"{cell.place}: {cell.shown} is not a finite number. If the target is a class, set "
                "data.task=classification; else correct the cell or remove the row"
            )
        values += Column(cell.column).values(cell, "raise")
    return None, torch.tensor(values, dtype=torch.float64)[:, None]


def several_targets(columns: list[list[Cell]], task: TableTask) -> Tensor:
    """Return several columns of numbers as `float64 [rows, targets]`."""
    if task == "classification":
        raise ValueError(
            "data.task=classification needs one target column: for several labels of 0 and 1, leave data.task out and "
            "set method.likelihood=multi-label"
        )
    return torch.cat([make_targets(cells, "regression")[1] for cells in columns], dim=1)


def _are_classes(cells: list[Cell]) -> bool:
    """Whether a target is meant as classes: all of it text, or two whole numbers, such as 0 and 1."""
    numbers = [cell.number for cell in cells if not cell.is_gap]
    if not numbers or any(number is None for number in numbers):
        return bool(numbers) and all(number is None for number in numbers)
    values = set(numbers)
    return len(values) == 2 and all(value is not None and value.is_integer() for value in values)


def _labels(cells: list[Cell]) -> tuple[tuple[str, ...], Tensor]:
    for cell in cells:
        if cell.is_gap:
            raise ValueError(f"{cell.place}: {cell.shown} is not a class label: a target has no gaps. Remove the row")
    texts = [cell.text for cell in cells]
    numbers = {text: as_number(text) for text in texts}
    numeric = all(value is not None for value in numbers.values())
    # By value, so that "10" comes after "9", and "1" and "1.0" are one class.
    keys = {text: (value or 0.0, "") if numeric else (0.0, text) for text, value in numbers.items()}
    order = {key: i for i, key in enumerate(sorted(set(keys.values())))}
    names = {order[keys[text]]: text for text in reversed(texts)}
    return tuple(names[i] for i in range(len(order))), torch.tensor([order[keys[text]] for text in texts])
