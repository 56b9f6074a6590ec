"""A queue of long trainings: one row at a time, resumed after a kill, every record put into results/ when it is made.

Rows are worked on in the folder that the commands of the papers use, too, by the same function (`run_jobs`). A row is
done when results/ has the record of its present settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from credo.core.errors import unknown
from credo.core.support.files import write_json, write_text
from credo.core.support.json_files import read_json
from reproductions.jobs import Job, Record, of_seed, run_jobs, stored_records
from reproductions.queue_rows import Group
from reproductions.quiet import queue_runs
from reproductions.studies import STUDIES
from reproductions.study import Stage

STATES = ("done", "running", "failed", "planned")
STATE = "queue.json"  # in the folder of the work: the row that is running, and the errors of those that failed

PAGE = """# Queue

Written by `python -m reproductions queue`; [queue_rows.py](queue_rows.py) has the rows, [README.md](README.md#queue)
how to run them. Minutes and hours are those of one core: measured for rows that are done, else (≈) those of the same
row with another seed, or by a timed epoch.

| state | rows | hours |
|---|---:|---:|"""
COLUMNS = ("| row | state | min | |", "|---|---|---:|---|")


@dataclass(frozen=True)
class Row:
    """A job with one seed; `group` says of which table."""

    group: Group
    job: str
    seed: int

    @property
    def name(self) -> str:
        """As the command line takes it: study/table/job/seed."""
        return f"{self.group.study}/{self.group.table}/{self.job}/{self.seed}"

    @cached_property
    def found(self) -> tuple[Stage, Job]:
        """The stage and the job; raises `ValueError` if the study has none of that name."""
        group = self.group
        table = STUDIES[group.study].tables[group.table]
        if self.seed and not table.seeds:
            raise ValueError(f"Table {group.table} of {group.study} has no seeds; give it only seed 0 in the queue.")
        choice: dict[str, Any] = {"rows": table.all_rows} if table.all_rows else {}
        stages = table.stages(group.scale, **choice, **({"seed": self.seed} if table.seeds else {}))
        jobs = {job.name: (stage, job) for stage in stages for job in stage.jobs}
        if (wanted := of_seed(self.job, self.seed)) not in jobs:
            raise ValueError(unknown(f"job of {group.study}, table {group.table}", wanted, jobs))
        return jobs[wanted]

    @property
    def folder(self) -> Path:
        """Folder of its record, relative to that of the work or of the results."""
        return Path(self.group.study) / self.group.scale / self.found[0].folder


@dataclass(frozen=True)
class Status:
    """A row as a line of the page.

    Args:
        row: The row.
        state: "done", "running", "failed" or "planned".
        minutes: Minutes of one core: measured if it is done, else those of the same job with another seed; None if
            there is none.
        note: Since when it is running, or why it failed.
    """

    row: Row
    state: str
    minutes: float | None
    note: str = ""


@dataclass(frozen=True)
class Queue:
    """Rows with the folders of their work and of their results.

    Args:
        groups: What to run, as in `queue_rows`.
        work: Folder with checkpoints, as runs/reproduce.
        results: Folder that gets the records.
    """

    groups: Sequence[Group]
    work: Path
    results: Path

    @cached_property
    def rows(self) -> list[Row]:
        """All rows in their order."""
        return [Row(group, job, seed) for group in self.groups for seed in group.seeds for job in group.jobs]

    def chosen(self, names: Sequence[str]) -> list[Row]:
        """Return the rows with these names, or whose names begin with one of them and a slash; all without names.

        Args:
            names: Such as "vogn", "continual/split" or "vogn/1/lenet5-vogn/2".
        """
        starts = {"/".join(row.name.split("/")[:count]) for row in self.rows for count in range(1, 5)}
        for name in names:
            if name not in starts:
                raise ValueError(unknown("row", name, sorted(starts)))
        return [row for row in self.rows if not names or any(f"{row.name}/".startswith(f"{n}/") for n in names)]

    def is_done(self, row: Row) -> bool:
        """Whether the results have its record, and the work the file that later rows need of it."""
        job, needed = row.found[1], row.group.needed
        there = not needed or (self.work / row.folder / f"{job.name}{needed}").exists()
        return there and bool(stored_records([job], self.results / row.folder))

    def statuses(self) -> list[Status]:
        """Return every row as it is now."""
        state = self._state()
        running = state.get("running") if queue_runs() else None
        return [self._status(row, running, state.get("failed", {})) for row in self.rows]

    def run(self, rows: Iterable[Row]) -> Iterator[tuple[Row, str | None]]:
        """Run the rows that are not done, and yield each with its error, if it had one.

        A row that fails does not stop the others, and is tried again the next time.

        Args:
            rows: What to run, in order.
        """
        for row in rows:
            if self.is_done(row):
                continue
            failed = self._state().get("failed", {})
            failed.pop(row.name, None)
            since = datetime.now().astimezone().isoformat(" ", "minutes")
            self._note({"running": {"row": row.name, "since": since, "process": os.getpid()}, "failed": failed})
            error = None
            try:
                stage, job = row.found
                ((_, record),) = run_jobs(stage.work, [job], self.work / row.folder, workers=1)
                write_json(self.results / row.folder / f"{job.name}.json", record)
            except Exception as caught:  # whatever it is, the other rows need not wait for it
                error = f"{type(caught).__name__}: {caught}"
                failed[row.name] = error
            finally:
                self._note({"running": None, "failed": failed})
            yield row, error

    def _status(self, row: Row, running: dict[str, Any] | None, failed: dict[str, str]) -> Status:
        if running is not None and running["row"] == row.name:
            return Status(
                row, "running", self._estimate(row), f"since {running['since']}, process {running['process']}"
            )
        if self.is_done(row):
            return Status(row, "done", self._estimate(row, own=True))
        if row.name in failed:
            return Status(row, "failed", self._estimate(row), failed[row.name])
        return Status(row, "planned", self._estimate(row))

    def _estimate(self, row: Row, *, own: bool = False) -> float | None:
        """Minutes in its own record, else the first known of another seed (or of other settings), else the group's."""
        seeds = dict.fromkeys([row.seed] if own else [row.seed, *row.group.seeds])
        paths = [self.results / row.folder / f"{of_seed(row.job, seed)}.json" for seed in seeds]
        known = (minutes_of(read_json(path)) for path in paths if path.exists())
        return next((minutes for minutes in known if minutes is not None), row.group.minutes)

    def _state(self) -> dict[str, Any]:
        path = self.work / STATE
        return read_json(path) if path.exists() else {}

    def _note(self, state: dict[str, Any]) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        write_json(self.work / STATE, state)


def minutes_of(record: Record) -> float | None:
    """Return the minutes of one core that a record took, or None if it does not say.

    CPU time if it was measured, else wall-clock time. A resumed record has the time of its last part there; its
    training alone, of all parts, may be longer.
    """
    wall, numbers = record.get("wall", {}), record.get("numbers", {})
    own = record.get("seconds", numbers.get("training_seconds", 0.0) + numbers.get("seconds", 0.0))
    training = sum(own) if isinstance(own, list) else own
    whole = wall.get("cpu_seconds", wall.get("seconds", 0.0))
    seconds = max(whole, training) if wall.get("resumed") else whole or training
    return seconds / 60 if seconds else None


def summary(statuses: Sequence[Status]) -> dict[str, dict[str, float]]:
    """Return the number of rows and their hours by state, as far as hours are known.

    Args:
        statuses: As `Queue.statuses` returns them.
    """
    found = {}
    for state in STATES:
        minutes = [status.minutes for status in statuses if status.state == state]
        found[state] = {"rows": len(minutes), "hours": sum(m for m in minutes if m is not None) / 60}
    return found


def write_page(path: Path, statuses: Sequence[Status]) -> None:
    """Write the rows as a Markdown page.

    Args:
        path: The page.
        statuses: As `Queue.statuses` returns them.
    """
    counts = [
        f"| {state} | {found['rows']} | {found['hours']:.1f} |"
        for state, found in summary(statuses).items()
        if found["rows"]
    ]
    lines = [
        f"| {status.row.name} | {status.state} | {shown_minutes(status)} | {_cell(status.note)} |"
        for status in statuses
    ]
    write_text(path, "\n".join([PAGE, *counts, "", *COLUMNS, *lines, ""]))


def shown_minutes(status: Status) -> str:
    """Return its minutes, with ≈ for those that another seed took."""
    if status.minutes is None:
        return "not known"
    return f"{'' if status.state == 'done' else '≈ '}{status.minutes:.1f}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
