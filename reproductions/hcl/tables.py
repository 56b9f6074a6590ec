"""Streams without task boundaries: functional regularisation and replay beside their baselines, over three seeds.

The learner sees labelled batches; it is told neither where a task ends nor, when it predicts, which task a row is from.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from credo.core.support.json_files import read_json
from credo.experiments.config import make_experiment
from credo.experiments.continual.stream import make_stream_experiment, run_stream_experiment
from credo.experiments.runs import RESULT, Run, versions
from reproductions.continual.tables import run_job as run_sequence
from reproductions.hcl.rows import (
    NETWORK,
    PRINTED,
    ROWS,
    SEQUENCES,
    TITLES,
    experiment_for,
    network_for,
    seeds_of,
    sequence_of,
)
from reproductions.jobs import Job, Record, Records, of_seed
from reproductions.retyped import Training, one_training, run_folder
from reproductions.seeds import spread
from reproductions.study import ResultTable, Stage, smoke_note

_KEPT = ("matrix", "seconds", "events", "detection", "temperature", "summary", "tasks", "versions")
_HEADS = {
    "split": "Split MNIST, boundaries not given",
    "baselines": "Baselines on split MNIST",
    "recurrence": "MNIST, Fashion-MNIST, MNIST again, boundaries not given",
    "features": "Split CIFAR-10 on frozen features, boundaries not given",
}
_NOTES = {
    "split": "Reported: HCL as Zhu et al. (2022) give it; its flow works on pixels, ours on their frequencies.",
    "baselines": "VCL and VOGN: MLPs with one head for all digits, which are told the task when they learn, but not "
    "when they predict; their settings were chosen for tasks with a head each, not for this.",
    "recurrence": "Labels are shared by the two data sets. In place of MNIST and SVHN, which the paper has in turn.",
    "features": "Reported: HCL as Zhu et al. (2022) give it, on features of a network trained on ImageNet. Ours are "
    "the 64 features of a ResNet-20 that was trained on {examples} images of CIFAR-100 for {epochs} epochs ({accuracy} "
    "% test accuracy there), whose classes are others; they are much weaker, as joint training shows.",
}


def stages_of(table: str, scale: str, seed: int | None = None) -> list[Stage]:
    """The streams of every row; before those on features, the training of their network.

    Args:
        table: One of `ROWS`.
        scale: The preset.
        seed: Seed of means, weights and batches; None: all of `seeds_of`.
    """
    kind, rows = ROWS[table]
    streams, sequences = [], []
    for one in seeds_of(scale) if seed is None else (seed,):
        for row in rows:
            name = of_seed(f"{kind}-{row}", one)
            if row in SEQUENCES:
                sequences.append(Job(name, {"method": row, "experiment": sequence_of(row, scale, one)}))
            else:
                network = {"network": network_for(scale)} if kind == "features" else {}
                streams.append(Job(name, {"experiment": experiment_for(kind, row, scale, one), **network}))
    first = [Job(NETWORK, {"experiment": network_for(scale)})] if kind == "features" else []
    stages = [
        Stage("", train_network, first, trainings=one_training),
        Stage("", run_job, streams, trainings=trainings_of),
        Stage("", run_sequence, sequences, trainings=one_training),
    ]
    return [stage for stage in stages if stage.jobs]


def train_network(arguments: dict[str, Any], folder: Path) -> Record:
    """Train the network whose features are learned."""
    run = Run(folder)
    for _ in run.train(make_experiment(arguments["experiment"])):
        pass
    result = run.result()
    return {"test": result["test"], "seconds": result["seconds"], "versions": versions()}


def trainings_of(name: str, arguments: dict[str, Any]) -> list[Training]:
    """Return the one stream of a job, on features of the run of their network if it has one.

    Args:
        name: The job's name.
        arguments: Of `run_job`.
    """
    tables = arguments["experiment"]
    if "network" in arguments:
        tables = {**tables, "continual": {**tables["continual"], "features": run_folder("hcl", NETWORK)}}
    return [Training(name, tables)]


def run_job(arguments: dict[str, Any], folder: Path) -> Record:
    """Learn one stream, resumed at any batch; one on features finds their network beside it, or trains it there."""
    tables = arguments["experiment"]
    if "network" in arguments:
        beside = folder.parent / NETWORK
        train_network({"experiment": arguments["network"]}, beside)
        tables = {**tables, "continual": {**tables["continual"], "features": str(beside)}}
    for _ in run_stream_experiment(make_stream_experiment(tables), folder):
        pass
    found = read_json(folder / RESULT)
    return {name: found[name] for name in _KEPT}


def finish(table: str, records: Records, scale: str) -> ResultTable:
    """Mean accuracy after the last task, forgetting and the changes of task that were found.

    Args:
        table: One of `ROWS`.
        records: Records by job name.
        scale: The preset.
    """
    kind, names = ROWS[table]
    rows = []
    for name in names:
        found = [records.get(of_seed(f"{kind}-{name}", seed)) for seed in seeds_of(scale)]
        of_seeds = [record for record in found if record]
        if of_seeds:
            rows.append([TITLES[name], PRINTED.get(table, {}).get(name), *_cells(of_seeds)])
    columns = ["forgetting", "ACC % reported", "ACC %", "BWT %", "changes found", "longest delay", "false alarms"]
    columns += ["returns recognised", "seeds", "min"]
    kept = [place for place in range(len(columns)) if not rows or any(row[place] is not None for row in rows)]
    notes = [
        "ACC: mean test accuracy over the tasks after the last, the task not given; BWT: change on earlier tasks; both "
        "mean ± standard deviation over the seeds. Delays in batches of 128, false alarms in all batches of all seeds. "
        "Settings were chosen on held-out training rows" + (" of MNIST." if table == "features" else "."),
        _note(table, records),
        *smoke_note(scale),
    ]
    shown = [[row[place] for place in kept] for row in rows]
    return ResultTable(f"{_HEADS[table]} (Kirichenko et al. 2021)", [columns[place] for place in kept], shown, notes)


def _note(table: str, records: Records) -> str:
    if table == "recurrence":
        return " ".join([_NOTES[table], *_by_task(records)])
    network = records.get(NETWORK)
    training = {} if network is None else network["arguments"]["experiment"]["training"]
    accuracy = "–" if network is None else f"{100 * network['test']['accuracy']:.1f}"
    examples, epochs = training.get("examples") or "all", training.get("epochs", "–")
    return _NOTES[table].format(epochs=epochs, examples=examples, accuracy=accuracy)


def _by_task(records: Records) -> list[str]:
    """What functional regularisation has on each task after the last."""
    of_seeds = [record for name, record in records.items() if "-functional" in name]
    if not of_seeds:
        return []
    tasks = of_seeds[0]["tasks"]
    found = [_spread([record["matrix"][-1][place] for record in of_seeds]) for place in range(len(tasks))]
    epochs = of_seeds[0]["arguments"]["experiment"]["training"]["epochs"]
    after = ", ".join(f"{value} % on {task}" for task, value in zip(tasks, found, strict=True))
    return [f"HCL-FR has {after}, with {epochs} {'epoch' if epochs == 1 else 'epochs'} of each."]


def _cells(records: list[Record]) -> list[str | None]:
    """Of one row: ACC, BWT, changes found, longest delay, false alarms, returns recognised, seeds, minutes."""
    found = [record["detection"] for record in records if record.get("detection")]
    backward = [record["summary"].get("backward_transfer") for record in records]
    cells: list[str | None] = [_spread([record["summary"]["accuracy"] for record in records])]
    cells.append(None if None in backward else _spread(backward, sign="+"))
    cells += _detection(found) if found else [None] * 4
    minutes = mean(sum(record["seconds"]) / 60 for record in records)
    return [*cells, str(len(records)), f"{minutes:.1f}"]


def _detection(found: list[dict[str, Any]]) -> list[str | None]:
    def total(name: str) -> int:
        return sum(one[name] for one in found)

    delays = [delay for one in found for delay in one["delays"] if delay is not None]
    alarms = sum(len(one["false_alarms"]) for one in found)
    returns = f"{total('recognised')} of {total('recurrences')}" if total("recurrences") else None
    longest = str(max(delays)) if delays else None
    return [f"{total('found')} of {total('changes')}", longest, f"{alarms} in {total('batches'):,}", returns]


def _spread(values: list[float], sign: str = "") -> str:
    return spread([100 * value for value in values], sign=sign)
