"""Practical deep learning with Bayesian principles (Osawa et al. 2019): its CIFAR-10 results, run again.

Rows are networks times optimisers: the paper's (Adam, BBB, MC-dropout, VOGN) and further ones of ours. "Validation" is
CIFAR-10's test set, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from credo.core.support.json_files import read_json_lines
from credo.evaluate.suite import quick_metrics
from credo.experiments.config import in_order, make_experiment, prepare
from credo.experiments.runs import CHECKPOINT, LOG, Run
from credo.predict import predict
from credo.training.files.checkpoint import load_checkpoint
from reproductions.jobs import Cell, Table, run_cells, smoke_note, stored_records
from reproductions.vogn.rows import NETWORKS, OPTIMISERS, PRINTED, chosen_rows, experiment_for

COLUMNS = ("train / val %", "val NLL", "epochs", "s/epoch", "ECE", "AUROC")


def train_cell(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train one row to its end and measure it with `draws` networks; train accuracy is that of the final posterior."""
    run, experiment = Run(folder), make_experiment(arguments["experiment"])
    for _ in run.train(experiment, draws=arguments["draws"]):
        pass
    result = run.result()
    prepared = prepare(experiment)
    # The very state that the test numbers are of: a temperature that rises with the steps is not in a saved model.
    prepared.posterior.load_state_dict(load_checkpoint(folder / CHECKPOINT)["posterior"])
    on_train = predict(prepared.posterior, in_order(prepared.dataset.train), draws=arguments["draws"])
    epochs = read_json_lines(folder / LOG)
    numbers = {
        "train_accuracy": 100 * quick_metrics(on_train)["accuracy"],
        "accuracy": 100 * result["test"]["accuracy"],
        "nll": result["test"]["nll"],
        "epochs": result["epochs"],
        "seconds_per_epoch": median(epoch["seconds"] for epoch in epochs),
        "ece": result["test"]["ece"],
        "auroc": result["test"]["misclassification_auroc"],
    }
    kept = {key: result[key] for key in ("experiment", "seed", "seconds", "draws", "versions")}
    place = {key: arguments[key] for key in ("network", "optimiser")}
    return {**kept, **place, "numbers": numbers, "intervals": result["test"]["intervals"]}


def table_1_cells(scale: str, rows: tuple[str, ...] = (), seed: int = 0) -> list[Cell]:
    """One cell for each row."""
    return [
        Cell(
            f"{network}-{optimiser}",
            {
                "network": network,
                "optimiser": optimiser,
                "draws": NETWORKS[network].draws,
                "experiment": experiment_for(network, optimiser, scale, seed),
            },
        )
        for network, optimiser in chosen_rows(scale, rows)
    ]


def table_1(
    folder: Path, *, scale: str, jobs: int, rows: tuple[str, ...] = ()
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Run what is missing of the chosen rows; yields each row's record."""
    return run_cells(train_cell, table_1_cells(scale, rows), folder / "table1", jobs=jobs)


def table_1_records(folder: Path, scale: str) -> dict[str, dict[str, Any]]:
    """What the folder has of all rows, whichever were asked for."""
    return stored_records(table_1_cells(scale, tuple(NETWORKS)), folder / "table1")


def table_1_result(records: dict[str, dict[str, Any]], scale: str) -> Table:
    """Ours beside the paper's, for all rows that have a record."""
    rows: list[list[Any]] = []
    notes = [
        "Ours beside the paper's; – where the paper has no such row. One seed. Validation: CIFAR-10's test set. AUROC: "
        "right predictions against wrong ones, score max p. s/epoch: ours is the median on one CPU thread "
        "of a machine that may do other things, too, so not for comparing methods.",
    ]
    for network, optimiser in chosen_rows("paper"):
        record = records.get(f"{network}-{optimiser}")
        if record is None:
            continue
        title = f"{NETWORKS[network].title} {OPTIMISERS[optimiser]}"
        rows.append([title, *_pairs(network, optimiser, record["numbers"])])
        notes.append(f"{title}: {_describe(record)}")
    notes += smoke_note(scale)
    columns = [f"{column}{whose}" for column in COLUMNS for whose in (" paper", "")]
    return Table("CIFAR-10 results of Osawa et al. (2019)", ["row", *columns], rows, notes)


def _pairs(network: str, optimiser: str, ours: dict[str, float]) -> list[str | None]:
    """Paper and ours by turns, in the order of `COLUMNS`."""
    shown = [
        f"{ours['train_accuracy']:.2f} / {ours['accuracy']:.2f}",
        f"{ours['nll']:.3f}",
        f"{ours['epochs']:.0f}",
        f"{ours['seconds_per_epoch']:.2f}",
        f"{ours['ece']:.3f}",
        f"{ours['auroc']:.3f}",
    ]
    printed = PRINTED.get((network, optimiser))
    theirs: list[str | None] = [None] * len(COLUMNS)
    if printed is not None:
        theirs = [
            f"{printed.train:.2f} / {printed.validation:.2f}",
            f"{printed.nll:.3f}",
            f"{printed.epochs}",
            f"{printed.seconds:.2f}",
            f"{printed.ece:.3f}",
            f"{printed.auroc:.3f}",
        ]
    return [cell for pair in zip(theirs, shown, strict=True) for cell in pair]


def _describe(record: dict[str, Any]) -> str:
    """What was asked for, without what is a default."""
    given = record["arguments"]["experiment"]
    training = ", ".join(f"{key} {given['training'][key]}" for key in ("epochs", "batch_size"))
    schedule = given["training"].get("schedule", "constant")
    options = ", ".join(f"{key} {value}" for key, value in given["method"].items() if key != "name")
    return f"{options}; {training}, {schedule} rate; {record['draws']} draws"
