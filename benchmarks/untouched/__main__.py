"""What users get who set nothing: every method with its defaults, beside plain networks and other libraries.

    python -m benchmarks.untouched --tasks all --contenders all
    python -m benchmarks.untouched.fresh          # tasks that no default was chosen on
    python -m benchmarks.untouched.fresh_again    # others, written when a default had changed
    python -m benchmarks.untouched.fresh_values   # a third set, for auto
    python -m benchmarks.untouched.noisy          # small tasks with little and much noise, which it was chosen on
    python -m benchmarks.untouched.fresh_third    # others, written before VOGN had another step
    python -m benchmarks.untouched.varied         # sharp functions, series, fine-tuning, short trainings: to choose on

Every contender has the same rows, network, initial weights, batch size and number of passes on tasks that no default
was chosen for one by one. One record for each task is written after each run, and a run that was stopped goes on from
it; the losses of single rows, for paired intervals, are beside them in losses/ and not committed: differences of runs
whose losses are on another machine stay those of the summary. A record is of one processor: the same run rounds
otherwise on another, and hundreds of steps make a visible difference of it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from benchmarks.report import Run as Record
from benchmarks.report import count, names_of, processor, say
from benchmarks.untouched.contenders import AUTO, BY_ADAM, CALIBRATED, OURS, PLAIN, USUAL, Run
from benchmarks.untouched.fresh import FRESH
from benchmarks.untouched.fresh_again import FRESH_AGAIN
from benchmarks.untouched.fresh_third import FRESH_THIRD
from benchmarks.untouched.fresh_values import FRESH_VALUES
from benchmarks.untouched.noisy import CHECK, DEVELOPMENT
from benchmarks.untouched.page import tables
from benchmarks.untouched.peers import PEERS
from benchmarks.untouched.table import Losses, summary, text
from benchmarks.untouched.tasks import TASKS, Problem, Task
from benchmarks.untouched.varied import VARIED
from credo.core.support.files import write_json
from credo.data import DataMissingError

FOLDER = Path("results/benchmarks/untouched")
ALL_TASKS = TASKS | FRESH | FRESH_AGAIN | FRESH_VALUES | FRESH_THIRD | DEVELOPMENT | CHECK | VARIED
CONTENDERS: dict[str, Run] = {**PLAIN, **OURS, **CALIBRATED, **USUAL, **BY_ADAM, **AUTO, **PEERS}


def run_task(name: str, contenders: list[str], seeds: range, folder: Path) -> None:
    """Run every contender and seed of a task that its record does not have yet."""
    path = folder / f"{name}.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"numbers": {}}
    rows: dict[str, Any] = stored["numbers"]
    record = Record("untouched", {"task": ALL_TASKS[name].title}, threads=1)
    for seed in seeds:
        problem: Problem | None = None
        for contender in contenders:
            key = f"{contender}, seed {seed}"
            if key in rows and (folder / "losses" / name / f"{key}.npy").exists():
                continue
            _check_processor(path, stored.get("processor"))
            problem = problem or ALL_TASKS[name].make(seed)
            say(f"{name}: {key}")
            rows[key] = _run(problem, contender, seed, folder / "losses" / name / f"{key}.npy")
            write_json(path, record.record(rows))


def _check_processor(path: Path, before: str | None) -> None:
    """Raise SystemExit if the record's other runs were made on another processor."""
    here = processor()
    if before not in (None, here):
        raise SystemExit(
            f"The runs in {path} were made on {before}, this is {here}: the same run rounds otherwise here, so paired "
            "differences would compare processors. Give another --folder and run all contenders there."
        )


def _run(problem: Problem, contender: str, seed: int, losses: Path) -> dict[str, Any]:
    start = time.process_time()
    result = CONTENDERS[contender](problem, seed)
    seconds = time.process_time() - start
    losses.parent.mkdir(parents=True, exist_ok=True)
    temporary = losses.with_suffix(f".{os.getpid()}.part")
    with temporary.open("wb") as file:
        np.save(file, result.losses.numpy())
    temporary.replace(losses)
    inside = float(result.correct.double().mean())
    scores = {"coverage": inside, "rmse": result.error} if problem.is_regression else {"accuracy": inside}
    ece = {} if result.ece is None else {"ece": result.ece}
    return {"nll": float(result.losses.mean()), **scores, **ece, "rows": len(result.losses), "seconds": seconds}


def stored_losses(folder: Path) -> Losses:
    """The losses of all rows, by task and contender, for each seed of the records; None where they are not here."""
    found: Losses = {}
    for task, numbers in stored_numbers(folder).items():
        for key in sorted(numbers):
            path = folder / "losses" / task / f"{key}.npy"
            losses = found.setdefault((task, key.rpartition(", seed ")[0]), [])
            losses.append(np.load(path) if path.exists() else None)
    return found


def stored_means(folder: Path) -> dict[str, dict[str, float]]:
    """The NLL of each task and contender, over the seeds of the records."""
    means: dict[str, dict[str, float]] = {}
    for task, numbers in stored_numbers(folder).items():
        seeds: dict[str, list[float]] = {}
        for key in sorted(numbers):
            seeds.setdefault(key.rpartition(", seed ")[0], []).append(numbers[key]["nll"])
        means[task] = {contender: fmean(each) for contender, each in seeds.items()}
    return means


def stored_numbers(folder: Path) -> dict[str, Any]:
    """The numbers of all records, by task."""
    paths = {name: folder / f"{name}.json" for name in ALL_TASKS}
    return {
        name: json.loads(path.read_text(encoding="utf-8"))["numbers"] for name, path in paths.items() if path.exists()
    }


def _available(names: list[str]) -> Iterator[str]:
    for name in names:
        try:
            ALL_TASKS[name].check()
        except DataMissingError as error:
            say(f"left out: {name}. {error}")
        else:
            yield name


def main(given: list[str] | None = None, possible: Mapping[str, Task] = TASKS, folder: Path = FOLDER) -> None:
    """Run what is missing, and print the table.

    Args:
        given: Arguments of the command line.
        possible: Tasks that may be chosen.
        folder: Where records go.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.untouched", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=names_of("task", possible), default=list(possible), metavar="NAMES")
    parser.add_argument("--contenders", type=names_of("contender", CONTENDERS), metavar="NAMES")
    parser.add_argument("--seeds", type=count, default=3, metavar="N", help="splits and initial weights (default: 3)")
    parser.add_argument(
        "--first-seed", type=int, default=0, metavar="N", help="other splits, with --folder: defaults are chosen on 100"
    )
    parser.add_argument("--folder", type=Path, default=folder, metavar="PATH", help=f"records (default: {folder})")
    chosen = parser.parse_args(given)
    contenders = chosen.contenders or [*PLAIN, *OURS, *CALIBRATED]
    torch.set_num_threads(1)
    for name in _available(chosen.tasks):
        run_task(name, contenders, range(chosen.first_seed, chosen.first_seed + chosen.seeds), chosen.folder)
    before = chosen.folder / "summary.json"
    earlier = json.loads(before.read_text(encoding="utf-8")) if before.exists() else None
    made = summary(stored_losses(chosen.folder), stored_means(chosen.folder), earlier)
    made["tables"] = tables(made, stored_numbers(chosen.folder))
    write_json(chosen.folder / "summary.json", made)
    print(text(made))


if __name__ == "__main__":
    main()
