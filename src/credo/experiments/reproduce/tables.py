"""What every reproduction shares: cells that run on their own, resume on their own, and end in a record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from credo.core.files import write_json

SCALES = ("smoke", "cpu", "paper")


@dataclass(frozen=True)
class Table:
    """A finished table: ours beside the paper's; numbers are percentages or as the column says."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    notes: list[str]


@dataclass(frozen=True)
class Cell:
    """One training of a reproduction: its name, and the JSON-able arguments of the function that runs it."""

    name: str
    arguments: dict[str, Any]


Work = Callable[[dict[str, Any], Path], dict[str, Any]]


def run_cells(work: Work, cells: Iterable[Cell], folder: Path, *, jobs: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Run the cells that have no record yet, `jobs` at a time on one thread each, and yield every record.

    `work(arguments, place)` trains in `place`, where it may leave checkpoints; its record is written atomically, so a
    killed reproduction goes on where it stopped.
    """
    waiting = []
    for cell in cells:
        record = folder / f"{cell.name}.json"
        if record.exists():
            yield cell, json.loads(record.read_text(encoding="utf-8"))
        else:
            waiting.append(cell)
    if jobs <= 1 or len(waiting) <= 1:
        for cell in waiting:
            yield cell, _run_one(work, cell, folder)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        futures = {pool.submit(_run_one, work, cell, folder): cell for cell in waiting}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _one_thread() -> None:
    torch.set_num_threads(1)


def _run_one(work: Work, cell: Cell, folder: Path) -> dict[str, Any]:
    record = work(cell.arguments, folder / "runs" / cell.name)
    write_json(folder / f"{cell.name}.json", record)
    # Read back: a fresh record and a stored one are the same to the last digit.
    stored: dict[str, Any] = json.loads((folder / f"{cell.name}.json").read_text(encoding="utf-8"))
    return stored
