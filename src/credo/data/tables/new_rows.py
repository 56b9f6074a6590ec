"""Read rows of a new table as inputs of a trained network; columns are found by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from credo.data.tables.columns import Columns
from credo.data.tables.reading import Table, read_table


def read_rows(
    path: Path, columns: Columns, *, mark: bool = False, lines: list[str] | None = None
) -> tuple[Tensor, list[str]]:
    """Return inputs `float64 [rows, inputs]`, not yet standardised, and notes for the user.

    With a header, columns are found by name in any order, and those named like targets or dropped ones are left out.
    Without a header, here or in training, columns are taken by position, with or without the dropped ones.

    Args:
        path: The new table.
        columns: Those of the training table.
        mark: Mark gaps that are not filled as infinite instead of raising.
        lines: The lines of a table that is in no file; `path` is then what messages call it.
    """
    # Without names and numbers, a header cannot be told from a row of categories.
    header = False if not columns.has_header and all(c.categories for c in columns.inputs) else None
    table = read_table(path, header=header, names=columns.names if columns.has_header else (), lines=lines)
    if not table.rows:
        raise ValueError(f"{path} holds no input.")
    by_name = table.has_header and columns.has_header
    indices = _by_name(table, columns) if by_name else _by_order(table, columns)
    return columns.encode(table.cells(indices), mark=mark), _notes(table, columns)


def _by_name(table: Table, columns: Columns) -> list[int]:
    given, wanted = list(table.columns), list(columns.names)
    if given == wanted:  # also with repeated names
        return list(range(len(given)))
    missing = [name for name in wanted if name not in given]
    ignored = {*columns.target_names, *(name for _, name in columns.dropped)}
    unknown = [name for name in given if name not in wanted and name not in ignored]
    twice = sorted(
        {name for name in given if given.count(name) > 1} - ignored | {n for n in wanted if wanted.count(n) > 1}
    )
    found = [("lacks", missing), ("has the unknown", unknown), ("or the training table has twice", twice)]
    wrong = " and ".join(f"{verb} {_listed(names)}" for verb, names in found if names)
    if wrong:
        raise ValueError(
            f"{table.path}: the header {wrong}. The run was trained on the columns {_listed(wanted)}, which may come "
            "in any order; without a header they are taken in this one."
        )
    return [given.index(name) for name in wanted]


def _by_order(table: Table, columns: Columns) -> list[int]:
    count, wanted = len(table.columns), len(columns.inputs)
    if columns.dropped and count == wanted + len(columns.dropped):
        dropped = {index for index, _ in columns.dropped}
        return [index for index in range(count) if index not in dropped]
    if count != wanted:
        called = f": {_listed(columns.names)}" if columns.has_header else ""
        raise ValueError(
            f"{table.path} has {count} columns; the run needs {wanted}{called}, without the target."
            + (" With a header, columns are found by name." if columns.has_header else "")
        )
    return list(range(count))


def _notes(table: Table, columns: Columns) -> list[str]:
    if table.has_header and not columns.has_header:
        return [
            f"the run was trained on a table without a header: the columns of {table.path} are taken in their order"
        ]
    targets = [name for name in columns.target_names if name in table.columns and name not in columns.names]
    if table.has_header and targets:
        if len(targets) > 1:
            return [f"the columns {_listed(targets)} of {table.path} are targets and are ignored"]
        return [f"the column {targets[0]!r} of {table.path} is the target and is ignored"]
    return []


def _listed(names: Sequence[str]) -> str:
    shown = [repr(name) for name in names[:20]]
    return ", ".join([*shown, f"… ({len(names)} in all)"] if len(names) > 20 else shown)
