"""How settings of the preset `cpu` were searched: equal numbers of trials, measured on 5,000 held-out training images.

A trial is trained on the other 45,000 images; of each row the trial with the lowest held-out NLL is chosen. The test
set takes no part. Adam, which the others are compared with, has two trials more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from credo.evaluate import measure
from credo.experiments.config import make_experiment, prepare
from credo.predict import predict
from credo.training import train
from reproductions.jobs import Job, Record, Records
from reproductions.study import ResultTable, Stage, smoke_note
from reproductions.vogn.rows import NETWORKS, OPTIMISERS, TRAIN_SIZE, experiment_for
from reproductions.vogn.trials import SEARCHES

HELD_OUT = 5_000


@dataclass(frozen=True)
class Trial:
    """One setting of a row, by its number."""

    network: str
    optimiser: str
    number: int

    @property
    def name(self) -> str:
        """The job's name."""
        return f"{self.network}-{self.optimiser}-{self.number}"


def trials(network: str = "", optimiser: str = "") -> Iterator[Trial]:
    """Yield all trials, or those of a network or a row.

    Args:
        network: A key of `NETWORKS`; empty: all.
        optimiser: A key of `OPTIMISERS`; empty: all.
    """
    for name, search in SEARCHES.items():
        for row, settings in search.settings.items():
            if network in ("", name) and optimiser in ("", row):
                yield from (Trial(name, row, number) for number in range(1, len(settings) + 1))


def trial_job(arguments: dict[str, Any], folder: Path) -> Record:
    """Train one trial and measure it on the held-out training images."""
    experiment = make_experiment(arguments["experiment"])
    prepared = prepare(experiment)
    options = experiment.training
    # Not `Run`, which measures the test set, too.
    seconds = [
        epoch.seconds
        for epoch in train(
            prepared.posterior,
            prepared.loader,
            epochs=options.epochs,
            schedule=options.make_schedule(),
            checkpoint=folder / "checkpoint.pt",
            seed=options.seed,
        )
    ]
    assert prepared.validation is not None
    found = measure(predict(prepared.posterior, prepared.validation, draws=arguments["draws"]), intervals=False)
    numbers = {"accuracy": 100 * found["accuracy"], "nll": found["nll"], "ece": found["ece"]}
    return {"experiment": experiment.to_dict(), "seconds": seconds, "numbers": numbers}


def search_stages(scale: str) -> list[Stage]:
    """One stage with all trials."""
    jobs = []
    for trial in trials():
        experiment = experiment_for(trial.network, trial.optimiser, scale, trial=trial.number)
        held_out = HELD_OUT if scale != "smoke" else 0.1
        experiment["training"] = {**experiment["training"], "validation": held_out}
        jobs.append(Job(trial.name, {"draws": NETWORKS[trial.network].draws, "experiment": experiment}))
    return [Stage("search", trial_job, jobs)]


def best(records: Records, network: str, optimiser: str) -> Trial | None:
    """Return the trial with the lowest held-out NLL; None while trials are missing.

    Args:
        records: Records of trials by name.
        network: A key of `NETWORKS`.
        optimiser: A key of `OPTIMISERS`.
    """
    every = list(trials(network, optimiser))
    if any(trial.name not in records for trial in every):
        return None
    return min(every, key=lambda trial: records[trial.name]["numbers"]["nll"])


def search_table(records: Records, scale: str) -> ResultTable:
    """Every trial with what it varies."""
    rows = []
    for trial in (trial for trial in trials() if trial.name in records):
        numbers = records[trial.name]["numbers"]
        chosen = "chosen" if trial == best(records, trial.network, trial.optimiser) else ""
        title = f"{NETWORKS[trial.network].title} {OPTIMISERS[trial.optimiser]}"
        setting = SEARCHES[trial.network].settings[trial.optimiser][trial.number - 1]
        shown = ", ".join(f"{name} {_short(value)}" for name, value in setting.items())
        measured = [f"{numbers['accuracy']:.2f}", f"{numbers['nll']:.3f}", f"{numbers['ece']:.3f}"]
        epochs = str(records[trial.name]["arguments"]["experiment"]["training"]["epochs"])
        rows.append([title, shown, epochs, *measured, chosen])
    notes = [
        f"Trained on {TRAIN_SIZE - HELD_OUT:,} training images and measured on the other {HELD_OUT:,}; of each row the "
        "trial with the lowest NLL is chosen.",
        *smoke_note(scale),
    ]
    columns = ["row", "setting", "epochs", "held-out accuracy %", "held-out NLL", "held-out ECE", ""]
    return ResultTable("How the settings on CIFAR-10 were searched", columns, rows, notes)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " / ".join(f"{key} {entry}" for key, entry in value.items())
    return "none" if value is None else f"{value:g}"
