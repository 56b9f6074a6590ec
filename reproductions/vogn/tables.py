"""The CIFAR-10 results of Osawa et al. (2019): training, measuring, and the result table.

Rows are networks times optimisers: the paper's (Adam, BBB, MC-dropout, VOGN) and further ones of ours. "Validation" is
CIFAR-10's test set, as in the paper.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from credo.core.support.json_files import read_json_lines
from credo.evaluate.suite import quick_metrics
from credo.experiments.config import in_order, make_experiment, prepare
from credo.experiments.runs import CHECKPOINT, LOG, Run
from credo.predict import predict
from credo.training.files.checkpoint import load_checkpoint
from reproductions.jobs import Job, Record, Records, of_seed
from reproductions.retyped import one_training
from reproductions.seeds import by_seed, paired, spread
from reproductions.study import ResultTable, Stage, smoke_note
from reproductions.vogn.rows import NETWORKS, OPTIMISERS, PRINTED, chosen_rows, experiment_for

COLUMNS = ("train / val %", "val NLL", "epochs", "s/epoch", "ECE", "AUROC")


def train_job(arguments: dict[str, Any], folder: Path) -> Record:
    """Train one row and measure it with `draws` networks; train accuracy is that of the final posterior."""
    run, experiment = Run(folder), make_experiment(arguments["experiment"])
    for _ in run.train(experiment, draws=arguments["draws"]):
        pass
    result = run.result()
    prepared = prepare(experiment)
    # The state that the test numbers belong to: a temperature that rises with the steps is not in a saved model.
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
    row = {key: arguments[key] for key in ("network", "optimiser")}
    return {**kept, **row, "numbers": numbers, "intervals": result["test"]["intervals"]}


def table_1_jobs(scale: str, rows: tuple[str, ...] = (), seed: int = 0) -> list[Job]:
    """One job per row.

    Args:
        scale: The preset.
        rows: Networks, or rows as NETWORK-OPTIMISER; the preset's own choice by default.
        seed: Seed of weights, batches and draws.
    """
    return [
        Job(
            of_seed(f"{network}-{optimiser}", seed),
            {
                "network": network,
                "optimiser": optimiser,
                "draws": NETWORKS[network].draws,
                "experiment": experiment_for(network, optimiser, scale, seed),
            },
        )
        for network, optimiser in chosen_rows(scale, rows)
    ]


def table_1_stages(scale: str, rows: tuple[str, ...] = (), seed: int = 0) -> list[Stage]:
    """One stage with the selected rows."""
    return [Stage("table1", train_job, table_1_jobs(scale, rows, seed), trainings=one_training)]


def table_1(records: Records, scale: str) -> ResultTable:
    """Ours beside the paper's, for all rows that have a record."""
    rows: list[list[Any]] = []
    for network, optimiser in chosen_rows("paper"):
        found = by_seed(records, f"{network}-{optimiser}")
        if found:
            title = f"{NETWORKS[network].title} {OPTIMISERS[optimiser]}"
            numbers = [record["numbers"] for record in found.values()]
            rows.append([title, *_pairs(network, optimiser, numbers), str(len(found))])
    notes = [
        "Ours beside the paper's; – where the paper has no such row. Over several seeds: mean ± standard deviation. "
        "Validation: CIFAR-10's test set. AUROC: right predictions against wrong ones, score max p. s/epoch: ours is "
        "the median on one CPU thread of a shared machine, so not for comparing methods.",
        *_leads(records),
        *smoke_note(scale),
    ]
    columns = [f"{column}{whose}" for column in COLUMNS for whose in (" paper", "")]
    return ResultTable("CIFAR-10 results of Osawa et al. (2019)", ["row", *columns, "seeds"], rows, notes)


def _leads(records: Records) -> list[str]:
    """Sentences: VOGN minus each other row of a network, paired by seed, where both have enough seeds."""
    told = []
    for network, optimiser in chosen_rows("paper"):
        ours, others = by_seed(records, f"{network}-vogn"), by_seed(records, f"{network}-{optimiser}")
        parts = []
        for name, title, digits in (("accuracy", "points", 2), ("nll", "NLL", 3), ("ece", "ECE", 3)):
            first, second = ({s: r["numbers"][name] for s, r in rows.items()} for rows in (ours, others))
            if optimiser != "vogn" and (found := paired(first, second, digits)):
                parts.append(f"{title} {found}")
        if parts:
            row = f"{NETWORKS[network].title} VOGN minus {OPTIMISERS[optimiser]}"
            told.append(f"{row}, paired by seed, 95 % t intervals: {', '.join(parts)}.")
    return told


def _pairs(network: str, optimiser: str, ours: list[dict[str, float]]) -> list[str | None]:
    """The paper's value and ours, one for each seed, for each of `COLUMNS`."""

    def over_seeds(name: str, digits: int) -> str:
        return spread([numbers[name] for numbers in ours], digits)

    shown = [
        f"{over_seeds('train_accuracy', 2)} / {over_seeds('accuracy', 2)}",
        over_seeds("nll", 3),
        f"{ours[0]['epochs']:.0f}",
        f"{median(numbers['seconds_per_epoch'] for numbers in ours):.2f}",
        over_seeds("ece", 3),
        over_seeds("auroc", 3),
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
