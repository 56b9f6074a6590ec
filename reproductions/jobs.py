"""What every reproduction shares: cells that run on their own, resume on their own, and end in a record."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from credo.core.support.denormals import flush_denormals
from credo.core.support.files import write_json
from credo.core.support.json_files import read_json
from credo.data.registry import require_dataset

SCALES = ("smoke", "cpu", "paper")


@dataclass(frozen=True)
class Table:
    """A finished table: ours beside the paper's; numbers are percentages or as the column says."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    notes: list[str]


def smoke_note(scale: str) -> list[str]:
    """A note below a table whose numbers mean nothing; none at other scales."""
    if scale != "smoke":
        return []
    return ["Scale smoke: digits, a tiny network, few epochs; only shows that the machinery works."]


@dataclass(frozen=True)
class Cell:
    """One training of a reproduction: its name, and the JSON-able arguments of the function that runs it."""

    name: str
    arguments: dict[str, Any]


Work = Callable[[dict[str, Any], Path], dict[str, Any]]


def run_cells(work: Work, cells: Iterable[Cell], folder: Path, *, jobs: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Run the cells that have no record yet, `jobs` at a time on one thread each, and yield every record.

    `work(arguments, place)` trains in `place`, where it may leave checkpoints; its record is written atomically, so a
    killed reproduction goes on where it stopped. A record of other arguments is refused. Data files of all cells are
    looked for before the first is run. `wall` says how long the cell took from its beginning to its record, and how
    long it had a processor; after a kill that is only the last part, and `resumed` is true.
    """
    waiting = []
    for cell in cells:
        record = folder / f"{cell.name}.json"
        if record.exists():
            yield cell, _stored(record, cell)
        else:
            waiting.append(cell)
    _require_data(waiting)
    if jobs <= 1 or len(waiting) <= 1:
        for cell in waiting:
            with _one_thread_here():
                record_now = _run_one(work, cell, folder)
            yield cell, record_now
        return
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        futures = {pool.submit(_run_one, work, cell, folder): cell for cell in waiting}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        # After an error the cells that nobody waits for must not run first.
        pool.shutdown(cancel_futures=True)


def _require_data(cells: Iterable[Cell]) -> None:
    """Nobody should learn after an hour that the files of the last network are missing."""
    asked = [cell.arguments.get("experiment", {}).get("data") for cell in cells]
    for name, root in dict.fromkeys((data["name"], data.get("root")) for data in asked if data):
        require_dataset(name, root=root)


def _start_worker() -> None:
    _end_with_parent()
    _one_thread()
    flush_denormals()


def _end_with_parent() -> None:
    """Workers of a killed command would train on, in the folder that the next one goes on with."""
    parent = parent_process()
    if parent is None:  # not a process of its own
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _one_thread() -> None:
    torch.set_num_threads(1)


@contextmanager
def _one_thread_here() -> Iterator[None]:
    """As in a worker, so that the numbers do not depend on `jobs`."""
    before = torch.get_num_threads()
    _one_thread()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run_one(work: Work, cell: Cell, folder: Path) -> dict[str, Any]:
    place = folder / "runs" / cell.name
    resumed, start, used = place.exists(), time.perf_counter(), time.process_time()
    record = work(cell.arguments, place)
    wall = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - used, "resumed": resumed}
    path = folder / f"{cell.name}.json"
    write_json(path, {**record, "wall": wall, "arguments": cell.arguments})
    # Read back: a fresh record and a stored one are the same to the last digit.
    return _stored(path, cell)


def stored_records(cells: Iterable[Cell], folder: Path) -> dict[str, dict[str, Any]]:
    """The records that are in the folder, in the order of the cells; those of other settings are left out."""
    found = {}
    for cell in cells:
        path = folder / f"{cell.name}.json"
        if path.exists() and _is_of(record := read_json(path), cell):
            found[cell.name] = record
    return found


def _stored(path: Path, cell: Cell) -> dict[str, Any]:
    record = read_json(path)
    if not _is_of(record, cell):
        raise ValueError(f"{path} is the record of other settings or another scale: use another folder, or delete it.")
    return record


def _is_of(record: dict[str, Any], cell: Cell) -> bool:
    return bool(record.get("arguments") == json.loads(json.dumps(cell.arguments)))
