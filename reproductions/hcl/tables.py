"""Split MNIST as a stream without task boundaries: functional regularisation and replay beside their baselines.

The learner sees labelled batches; it is told neither where a task ends nor, when it predicts, which task a row is from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from credo.core.support.json_files import read_json
from credo.experiments.continual.stream import make_stream_experiment, run_stream_experiment
from credo.experiments.runs import RESULT
from reproductions.jobs import Job, Record, Records, of_seed
from reproductions.study import ResultTable, Stage, smoke_note

TITLES = {
    "functional": "functional regularisation (HCL-FR)",
    "replay": "generative replay (HCL-GR)",
    "buffer": "a buffer of 500 examples",
    "nothing": "fine-tuning",
    "joint": "all tasks at once",
}
# Final mean accuracy in %, as a later paper reports HCL (Zhu et al. 2022, TAME); the first paper's own table was not at
# hand.
PRINTED = {"functional": "90.89", "replay": "84.65"}
ROWS = {"split": ("functional", "replay"), "baselines": ("buffer", "nothing", "joint")}
_KEPT = ("matrix", "seconds", "events", "detection", "temperature", "summary", "tasks", "versions")


def experiment_for(forgetting: str, scale: str, seed: int = 0) -> dict[str, Any]:
    """Return the stream of one row as TOML tables.

    Args:
        forgetting: One of `TITLES`.
        scale: The preset.
        seed: Seed of means, weights and batches.
    """
    small = scale == "smoke"
    method = {"name": "hybrid-flow", "forgetting": forgetting, "decay": 50.0, "burn_in": 60}
    if forgetting == "functional":
        method["strength"] = 3.0
    if forgetting == "replay":
        method["replays"] = 2.0
    size = {"hidden": 16, "couplings": 2, "burn_in": 5, "low": 4} if small else {"low": 12, "noise": 0.5}
    epochs = {"smoke": 2, "cpu": 4, "paper": 15}[scale]
    return {
        "continual": {"tasks": "split", "count": 5, "held_out": 100 if small else 5000},
        "data": {"name": "digits" if small else "mnist"},
        "method": {**method, **size},
        "training": {"epochs": epochs, "batch_size": 32 if small else 128, "seed": seed},
    }


def stages_of(table: str, scale: str, seed: int = 0) -> list[Stage]:
    """One stage with a job for each row; both tables have their records in the study's folder itself.

    Args:
        table: "split" or "baselines".
        scale: The preset.
        seed: Seed of means, weights and batches.
    """
    jobs = [
        Job(of_seed(f"split-{forgetting}", seed), {"experiment": experiment_for(forgetting, scale, seed)})
        for forgetting in ROWS[table]
    ]
    return [Stage("", run_job, jobs)]


def run_job(arguments: dict[str, Any], folder: Path) -> Record:
    """Learn one stream, resumed at any batch."""
    for _ in run_stream_experiment(make_stream_experiment(arguments["experiment"]), folder):
        pass
    found = read_json(folder / RESULT)
    return {name: found[name] for name in _KEPT}


def finish(table: str, records: Records, scale: str) -> ResultTable:
    """Mean accuracy after the last task, forgetting and the changes of task that were found.

    Args:
        table: "split" or "baselines".
        records: Records by job name.
        scale: The preset.
    """
    found = {forgetting: records.get(f"split-{forgetting}") for forgetting in ROWS[table]}
    rows = [[TITLES[name], PRINTED.get(name), *_cells(record)] for name, record in found.items() if record]
    columns = ["forgetting", "ACC % reported", "ACC %", "BWT %", "changes found", "delays", "false alarms", "min"]
    notes = [
        "ACC: mean test accuracy over the five tasks after the last, the task not given; BWT: change on earlier tasks. "
        "Delays in batches of 128. One seed. Settings were chosen on held-out training rows.",
        "Reported: HCL as Zhu et al. (2022) give it; its flow works on pixels, ours on their frequencies.",
        *smoke_note(scale),
    ]
    title = {"split": "Split MNIST, boundaries not given", "baselines": "Baselines on split MNIST"}[table]
    return ResultTable(f"{title} (Kirichenko et al. 2021)", columns, rows, notes)


def _cells(record: Record) -> list[str | None]:
    summary, detection = record["summary"], record["detection"]
    accuracy, minutes = f"{100 * summary['accuracy']:.2f}", f"{sum(record['seconds']) / 60:.1f}"
    if detection is None:  # joint training
        return [accuracy, None, None, None, None, minutes]
    return [
        accuracy,
        f"{100 * summary['backward_transfer']:+.2f}",
        f"{detection['found']} of {detection['changes']}",
        ", ".join("–" if delay is None else str(delay) for delay in detection["delays"]),
        f"{len(detection['false_alarms'])} in {detection['batches']:,}",
        minutes,
    ]
