"""Jobs of a reproduction: each runs and resumes on its own, and ends in one JSON record."""

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

from credo.core.arguments import group_of
from credo.core.kernels.denormals import flush_denormals
from credo.core.support.files import write_json
from credo.core.support.json_files import read_json
from credo.data.registry import require_dataset
from credo.experiments.options import current_table, method_options
from credo.methods import METHODS

Record = dict[str, Any]
Records = dict[str, Record]
Work = Callable[[dict[str, Any], Path], Record]


@dataclass(frozen=True)
class Job:
    """One training or measurement: its name, and the JSON-serialisable arguments of the function that runs it."""

    name: str
    arguments: dict[str, Any]


def of_seed(name: str, seed: int) -> str:
    """Return the name of a job with another seed; seed 0 has the plain name, as in tables of one seed.

    Args:
        name: The job's name.
        seed: The seed.
    """
    return f"{name}-seed{seed}" if seed else name


def run_jobs(work: Work, jobs: Iterable[Job], folder: Path, *, workers: int) -> Iterator[tuple[Job, Record]]:
    """Run the jobs without a record and yield the record of every job.

    Records are written atomically to `folder/NAME.json`, so that a killed reproduction resumes where it stopped. `wall`
    in a record is the wall-clock and CPU time of its job; after a kill, of its last part only, and `resumed` is true.
    The data files of all jobs are required before the first one starts.

    Args:
        work: `work(arguments, run_folder)` trains in `run_folder`, where it may leave checkpoints, and returns the
            record. With several workers it must be picklable.
        jobs: What to run.
        folder: Folder of the records; runs go to `folder/runs/NAME`.
        workers: Number of processes. Each uses one thread, also if there is only this process.

    Raises:
        ValueError: if a record in the folder has other arguments than its job.
    """
    waiting = []
    for job in jobs:
        path = folder / f"{job.name}.json"
        if path.exists():
            yield job, _stored(path, job)
        else:
            waiting.append(job)
    _require_data(waiting)
    if workers <= 1 or len(waiting) <= 1:
        for job in waiting:
            with _one_thread():
                record = _run_one(work, job, folder)
            yield job, record
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        futures = {pool.submit(_run_one, work, job, folder): job for job in waiting}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        # After an error, do not run the remaining jobs first.
        pool.shutdown(cancel_futures=True)


def stored_records(jobs: Iterable[Job], folder: Path) -> Records:
    """Return the records in the folder by name, in the order of the jobs, without those of other settings.

    Args:
        jobs: The jobs whose records are wanted.
        folder: Folder of the records.
    """
    found = {}
    for job in jobs:
        path = folder / f"{job.name}.json"
        if path.exists() and _matches(record := read_json(path), job):
            found[job.name] = record
    return found


def _require_data(jobs: Iterable[Job]) -> None:
    """Raise at once if data files are missing, not hours later when their network's turn comes."""
    wanted = [job.arguments.get("experiment", {}).get("data") for job in jobs]
    for name, root in dict.fromkeys((data["name"], data.get("root")) for data in wanted if data):
        require_dataset(name, root=root)


def _start_worker() -> None:
    _exit_with_parent()
    torch.set_num_threads(1)
    flush_denormals()


def _exit_with_parent() -> None:
    """Exit when the parent dies; the workers of a killed command would otherwise train on in the same folder."""
    parent = parent_process()
    if parent is None:  # runs in the main process
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


@contextmanager
def _one_thread() -> Iterator[None]:
    """As in a worker, so that the results do not depend on the number of workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run_one(work: Work, job: Job, folder: Path) -> Record:
    run_folder = folder / "runs" / job.name
    resumed, start, used = run_folder.exists(), time.perf_counter(), time.process_time()
    record = work(job.arguments, run_folder)
    wall = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - used, "resumed": resumed}
    path = folder / f"{job.name}.json"
    write_json(path, {**record, "wall": wall, "arguments": job.arguments})
    # Read back, so that a fresh record equals a stored one to the last digit.
    return _stored(path, job)


def _stored(path: Path, job: Job) -> Record:
    record = read_json(path)
    if not _matches(record, job):
        raise ValueError(f"{path} is the record of other settings or another scale: use another folder, or delete it.")
    return record


def _matches(record: Record, job: Job) -> bool:
    return bool(current_settings(record.get("arguments")) == current_settings(json.loads(json.dumps(job.arguments))))


# What rows had by default when the first records were written; rows of today state it.
_FIRST_DEFAULTS: dict[str, dict[str, Any]] = {
    "bbb": {"temperature": 1.0},
    "vogn": {"temperature": 1.0},
    "ivon": {"clip": None, "temperature": 1.0},
    "kfac": {"clip": 1e-2, "curvature": {}},
    "noisy-kfac": {"temperature": 1.0, "clip": 1e-2, "curvature": {}},
}
_EVERY_STEP = {"factor_every": 1, "inverse_every": 10}
_FIRST_CURVATURES: dict[str, dict[str, Any]] = {
    "vogn": {"decay": 0.999},
    "ogn": {"decay": 0.999},
    "ivon": {"decay": 0.9999},
    "kfac": _EVERY_STEP,
    "noisy-kfac": _EVERY_STEP,
}
_FIRST_TRAINING = {"schedule": "constant", "warmup": 0.0}


def current_settings(arguments: Any) -> Any:
    """Return arguments with the option names of this version and the first defaults: records may be older.

    Args:
        arguments: Of a job or a record, or a part of them.
    """
    if isinstance(arguments, list):
        return [current_settings(entry) for entry in arguments]
    if not isinstance(arguments, dict):
        return arguments
    name = arguments.get("name")
    if name not in METHODS:
        found = {key: current_settings(value) for key, value in arguments.items()}
        return {**_FIRST_TRAINING, **found} if "epochs" in found and "batch_size" in found else found
    table, options = current_table({**_FIRST_DEFAULTS.get(name, {}), **arguments})[0], method_options(name)
    kinds = {key: group_of(options.get(key)) for key in table}
    found = {key: value if (kind := kinds[key]) is None else kind.completed(value) for key, value in table.items()}
    if isinstance(found.get("curvature"), dict):
        first = _FIRST_CURVATURES.get(name, {})
        found["curvature"] |= {key: value for key, value in first.items() if found["curvature"].get(key, 0) is None}
    return found
