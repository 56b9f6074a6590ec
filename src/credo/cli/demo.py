"""`credo demo`: the main job on bundled data: train several methods, compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from credo.cli.output import errors_explained, print_json, print_table, say
from credo.experiments.config import make_experiment
from credo.experiments.runs import Run, evaluate_run

FOREIGN = "photo-patches"
DRAWS = 50

# The same network and number of epochs for all, so that the table compares methods.
_COMMON: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [128, 128], "dropout": 0.1},
    "training": {"epochs": 40, "batch_size": 64, "schedule": "cosine", "seed": 0, "validation": 0.1},
}
_METHODS: dict[str, dict[str, Any]] = {
    "map": {"name": "map", "lr": 2e-3},
    "mc-dropout": {"name": "mc-dropout", "lr": 2e-3},
    "ensemble": {"name": "ensemble", "members": 5, "of": {"name": "map", "lr": 2e-3}},
    "bbb": {"name": "bbb", "lr": 5e-3, "prior": 0.3, "temperature": 0.1, "std_init": 0.05},
}


def demo_command(
    folder: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a plain network and three Bayesian ones on bundled digits and compare them.

    Runs that are there already are not trained again. Foreign inputs are patches of photographs.
    """
    with errors_explained():
        # Networks this small gain nothing from a second thread, and lose much when the machine is busy.
        torch.set_num_threads(1)
        results = {name: _run(name, folder / name) for name in _METHODS}
        if as_json:
            print_json(results)
            return
        rows = [
            [name, m["accuracy"], m["nll"], m["ece"], m["ood"][FOREIGN]["entropy"]["auroc"], m["seconds"]]
            for name, m in results.items()
        ]
        columns = ["method", "accuracy", "NLL", "ECE", "OOD AUROC", "training s"]
        print_table(f"digits, {DRAWS} draws; foreign inputs: {FOREIGN}", columns, rows)
        say(f"runs are in {folder}; look at one with: credo evaluate {folder / 'bbb'} --samples 100")


def _run(name: str, folder: Path) -> dict[str, Any]:
    run = Run(folder)
    experiment = make_experiment({**_COMMON, "method": _METHODS[name]})
    if not run.finished:
        say(f"training {name} …")
    for _ in run.train(experiment, draws=DRAWS):
        pass
    metrics = evaluate_run(run, draws=DRAWS, ood=(FOREIGN,))
    return {**metrics, "seconds": run.result()["seconds"]}
