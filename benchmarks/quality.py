"""How good the predictions are: every method and other libraries on the same task, each tuned with the same budget.

    python -m benchmarks.quality --tasks digits,fashion-mnist

Everybody gets the same network with the same initial weights, the same batches, epochs and falling rate, four settings
to try and 32 draws to predict with. The setting with the lowest validation NLL is trained again from other seeds, and
these runs are measured on the test set. Times are this process's own CPU time. The record of a task is written after
each contender, and a run that was stopped goes on from it; delete it to measure all again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality_methods import OURS
from benchmarks.quality_peers import INSTALL, PEERS, missing
from benchmarks.quality_tables import image_losses, method_table, packed, quality_table, scores
from benchmarks.quality_tasks import DRAWS, TASKS, Contender, Options, Task
from benchmarks.report import Run, count, names_of, say, table
from credo import NonFiniteError
from credo.core.support.files import finite, write_json
from credo.evaluate import nll

FOLDER = Path("results/benchmarks/quality")
TUNING_SEED = 100
CONTENDERS = OURS | PEERS


def tune(task: Task, contender: Contender, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The validation NLL of every setting."""
    tried = []
    for options in settings:
        try:
            probs = contender.train(task, options, TUNING_SEED).predict(task.validation.x)
            loss = nll(probs, task.validation.y) if bool(torch.isfinite(probs).all()) else float("inf")
        except NonFiniteError:
            loss = float("inf")
        tried.append({"options": options, "validation_nll": loss})
    return tried


def judge(task: Task, contender: Contender, options: Options) -> dict[str, Any]:
    """Train from each seed; scores with intervals, and each seed's costs."""
    runs, inside, outside = [], [], []
    for seed in range(task.seeds):
        start = time.process_time()
        trained = contender.train(task, options, seed)
        after = time.process_time()
        inside.append(trained.predict(task.test.x))
        cost = {"train_seconds": after - start, "predict_seconds": time.process_time() - after}
        outside.append(trained.predict(task.ood))
        runs.append({**cost, "numbers": trained.numbers, "nll": nll(inside[-1], task.test.y)})
    probs = torch.stack(inside)
    found = scores(probs, task.test.y, torch.stack(outside))
    return {"runs": runs, "scores": found, "image_nll": packed(image_losses(probs, task.test.y))}


def contend(task: Task, name: str, rows: Mapping[str, Any], settings: list[dict[str, Any]]) -> dict[str, Any]:
    """Tune and judge one contender: its row of the record."""
    contender, start = CONTENDERS[name], time.process_time()
    tried = tune(task, contender, settings)
    if tried:
        options = min(tried, key=lambda one: one["validation_nll"])["options"]
    else:
        options = rows[str(contender.setting_of)]["options"]
    found = judge(task, contender, options)
    return {"peer": name in PEERS, "options": options, "tried": tried, **found, "seconds": time.process_time() - start}


def run_task(task: Task, names: list[str], run: Run, path: Path | None, settings: int | None) -> dict[str, Any]:
    """Everybody's rows, as far as an earlier run left them undone."""
    rows, earlier = {}, stored(path, run.config)
    for name in names:
        chosen = CONTENDERS[name].settings_for(task)[:settings]
        if is_done(earlier.get(name), chosen, rows.get(str(CONTENDERS[name].setting_of))):
            say(f"{task.title}: {name} is in {path}")
            rows[name] = earlier[name]
            continue
        say(f"{task.title}: {name}")
        rows[name] = contend(task, name, rows, chosen)
        # What an earlier run knows of others stays until they are measured again.
        write(path, record_of(run, {**earlier, **rows}))
    write(path, record_of(run, {**earlier, **rows}))  # the tables may be made in a new way
    return rows


def write(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        write_json(path, record)


def stored(path: Path | None, config: dict[str, Any]) -> dict[str, Any]:
    """The rows of an earlier run with the same data and effort."""
    if path is None or not path.exists():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["config"] == finite(config):
        rows: dict[str, Any] = record["numbers"]
        return rows
    say(f"{path} was measured with other data or effort: all is measured again")
    return {}


def is_done(row: Mapping[str, Any] | None, settings: list[dict[str, Any]], borrowed: Mapping[str, Any] | None) -> bool:
    """Whether a stored row is of these settings."""
    if row is None:
        return False
    if not settings:
        return borrowed is not None and row["options"] == borrowed["options"]
    return [one["options"] for one in row["tried"]] == settings


def record_of(run: Run, rows: Mapping[str, Any]) -> dict[str, Any]:
    """The record, with the tables made from it; ours stand before the others."""
    ordered = {name: rows[name] for name in CONTENDERS if name in rows}
    tables = {"quality": quality_table(ordered), "methods": method_table(ordered)}
    return {**run.record(ordered), "tables": tables, "seconds": sum(row["seconds"] for row in rows.values())}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options: dict[str, dict[str, Any]] = {
        "tasks": {"type": names_of("task", TASKS), "default": ["digits"], "help": f"some of {', '.join(TASKS)}"},
        "methods": {
            "type": names_of("method", OURS),
            "default": list(OURS),
            "help": f"ours: all (default), or some of {', '.join(OURS)}; map is always among them",
        },
        "peers": {
            "type": names_of("peer", PEERS),
            "help": f"other libraries: none, or some of {', '.join(PEERS)} (default: those that are installed)",
        },
    }
    for name, option in options.items():
        parser.add_argument(f"--{name}", metavar="NAMES", **option)
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="torch's threads (default: 1)")
    parser.add_argument("--folder", type=Path, metavar="PATH", help=f"for the records (default: {FOLDER})")
    quick = "one epoch and one setting, to see that all runs; written only if --folder is given"
    parser.add_argument("--quick", action="store_true", help=quick)
    chosen = parser.parse_args(given)
    absent = missing(PEERS if chosen.peers is None else chosen.peers)
    if chosen.peers is None:
        chosen.peers = [name for name in PEERS if name not in absent]
        if absent:
            say(f"left out, since not installed: {', '.join(absent)} ({INSTALL})")
    elif absent:
        parser.error(
            f"not installed: {', '.join(absent)}. Install them with\n  {INSTALL}\nor leave them out of --peers."
        )
    chosen.folder = chosen.folder or (None if chosen.quick else FOLDER)
    return chosen


def main(given: list[str] | None = None) -> None:
    chosen = arguments(given)
    names = ["map", *(name for name in OURS if name in chosen.methods and name != "map"), *chosen.peers]
    for name in chosen.tasks:
        task = TASKS[name]()
        if chosen.quick:
            task = replace(task, epochs=1, seeds=1, is_small=False)
        effort = {name: getattr(task, name) for name in ("epochs", "seeds", "batch_size", "schedule")}
        sizes = {part: len(getattr(task, part)) for part in ("train", "validation", "test", "ood")}
        run = Run("quality", {"task": task.title, "sizes": sizes, **effort, "draws": DRAWS}, chosen.threads)
        path = chosen.folder / f"{name}.json" if chosen.folder else None
        rows = run_task(task, names, run, path, settings=1 if chosen.quick else None)
        for made in record_of(run, rows)["tables"].values():
            print(table(task.title, made["columns"][1:], {line[0]: line[1:] for line in made["rows"]}))


if __name__ == "__main__":
    main()
