"""A study is a published work; its tables are made of jobs, and the records of the jobs become result tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from credo.core.support.files import write_json
from reproductions.jobs import Job, Record, Records, Work, run_jobs, stored_records
from reproductions.retyped import Trainings, commands_text
from reproductions.seeds import SEEDS

SCALES = ("smoke", "cpu", "paper")


@dataclass(frozen=True)
class ResultTable:
    """A finished table, ours beside the paper's; numbers are percentages or as the column states."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    notes: list[str]


def smoke_note(scale: str) -> list[str]:
    """Return a note for tables of the smoke preset, whose numbers mean nothing; none for other presets."""
    if scale != "smoke":
        return []
    return ["Preset smoke: digits, a tiny network, few epochs; only shows that the pipeline works."]


@dataclass(frozen=True)
class Stage:
    """Jobs of one kind.

    Args:
        folder: Folder of the records, relative to that of the study.
        work: The function that runs each job.
        jobs: The jobs in the order in which they are started.
        parallel: False for jobs so short that starting a worker would take longer.
        trainings: What `credo train` or `credo continual` trains for a job, by its name and arguments; None: nothing.
    """

    folder: str
    work: Work
    jobs: Sequence[Job]
    parallel: bool = True
    trainings: Trainings | None = None


@dataclass(frozen=True)
class Table:
    """A table that can be run.

    Args:
        about: What it shows, in one line for `--help`.
        stages: `stages(scale)` returns what to run, in order. It also takes `rows` if rows can be selected, `data` and
            `root` if there are other data, `seed` if `seeds`.
        finish: `finish(records, scale)` makes the result table of the records by job name; also takes `data` if there
            are other data.
        all_rows: The row names that together select every row; None if rows cannot be selected.
        data: Names of other data sets that the table can be run on.
        on_request: Run only if the table is named.
        first: Run before the other tables: it has their jobs too, and no worker idles at the end of each of them.
        seeds: Whether `stages` takes `seed`, for the same networks from other random numbers.
    """

    about: str
    stages: Callable[..., list[Stage]]
    finish: Callable[..., ResultTable]
    all_rows: tuple[str, ...] | None = None
    data: tuple[str, ...] = ()
    on_request: bool = False
    first: bool = False
    seeds: bool = False

    def count(self, scale: str, **choice: Any) -> int:
        """Return the number of jobs.

        Args:
            scale: The preset, one of `SCALES`.
            choice: `rows`, `data` and `root` for `stages`.
        """
        return sum(len(stage.jobs) for stage in self.stages(scale, **choice))

    def run(self, folder: Path, *, scale: str, workers: int, **choice: Any) -> Iterator[tuple[Job, Record]]:
        """Run what is missing, stage by stage, and yield the record of every job.

        Args:
            folder: Folder of the study's records.
            scale: The preset, one of `SCALES`.
            workers: Number of processes.
            choice: `rows`, `data` and `root` for `stages`.
        """
        for stage in self.stages(scale, **choice):
            workers_here = workers if stage.parallel else 1
            yield from run_jobs(stage.work, stage.jobs, folder / stage.folder, workers=workers_here)

    def records(self, folder: Path, scale: str, **choice: Any) -> Records:
        """Return the stored records of all rows and seeds by job name, whichever rows were run last.

        Args:
            folder: Folder of the study's records.
            scale: The preset, one of `SCALES`.
            choice: `data` and `root` for `stages`.
        """
        every = {"rows": self.all_rows} if self.all_rows else {}
        seeds: list[dict[str, int]] = [{"seed": seed} for seed in SEEDS] if self.seeds and not choice else [{}]
        found: Records = {}
        for seed in seeds:
            for stage in self.stages(scale, **every, **choice, **seed):
                found |= stored_records(stage.jobs, folder / stage.folder)
        return found

    def trained(self, scale: str) -> dict[str, Trainings]:
        """Return by job name how each network of seed 0 is trained by the command line.

        Args:
            scale: The preset, one of `SCALES`.
        """
        every = {"rows": self.all_rows} if self.all_rows else {}
        stages = self.stages(scale, **every, **({"seed": 0} if self.seeds else {}))
        return {job.name: stage.trainings for stage in stages if stage.trainings for job in stage.jobs}


@dataclass(frozen=True)
class Study:
    """A published work.

    Args:
        title: The work, with authors and year.
        tables: Its tables by number, and ours by name.
        figures: `figures(records, scale, folder)` draws what the records of the tables suffice for and returns the
            paths of the pictures.
    """

    title: str
    tables: dict[str, Table]
    figures: Callable[[Records, str, Path], list[Path]] | None = None


def table_commands(study: Study, name: str, key: str, folder: Path, scale: str) -> str:
    """Return the part of a page with the commands of a table's networks.

    Args:
        study: The paper.
        name: Its key in `STUDIES`.
        key: The table's key in `Study.tables`.
        folder: Folder of the study's records.
        scale: The preset, one of `SCALES`.
    """
    known: dict[str, str] = {}
    for earlier in list(study.tables)[: list(study.tables).index(key)]:
        known = {**dict.fromkeys(study.tables[earlier].trained(scale), earlier), **known}
    table = study.tables[key]
    return commands_text(name, table.trained(scale), table.records(folder, scale), known)


def table_file(name: str, data: str | None = None) -> str:
    """Return the file name of a result table in the folder of its study.

    Args:
        name: The table's key in `Study.tables`.
        data: The other data set it was run on, if any.
    """
    return "-".join([f"table{name}" if name.isdigit() else name, *([data] if data else [])]) + ".json"


def finish_table(
    table: Table, name: str, folder: Path, scale: str, *, data: str | None = None, root: str | None = None
) -> tuple[ResultTable, Records]:
    """Make a result table of the stored records and write it into the folder; return both.

    Args:
        table: The table.
        name: Its key in `Study.tables`.
        folder: Folder of the study's records.
        scale: The preset, one of `SCALES`.
        data: The other data set it was run on, if any.
        root: The folder of that data set.
    """
    records = table.records(folder, scale, **({"data": data, "root": root} if data else {}))
    result = table.finish(records, scale, **({"data": data} if data else {}))
    write_json(folder / table_file(name, data), {"scale": scale, **asdict(result)})
    return result, records
