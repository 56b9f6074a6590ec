"""`credo calibrate`: choose the scale of a run's noise and its temperature on held-out rows."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from credo.cli.device_option import Device
from credo.cli.output import errors_explained, new_app, print_json, print_table, say
from credo.cli.own_model import OwnModel, use_model_of
from credo.experiments.calibration import calibrate_run
from credo.experiments.runs import MODEL, Run

app = new_app()


class Rows(StrEnum):
    """Rows to choose on."""

    VALIDATION = "validation"
    TEST = "test"


@app.command("calibrate")
def _command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")],
    rows: Annotated[
        Rows,
        typer.Option(
            help="validation: examples that training held out; test: those of the report, which is then too good."
        ),
    ] = Rows.VALIDATION,
    draws: Annotated[int, typer.Option(help="Weight draws.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    recalibrate: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Choose a map of the averaged predictions as well: auto, temperature, vector, dirichlet, isotonic or "
            "beta; for regression auto, std-scale or quantile.",
        ),
    ] = None,
    model: OwnModel = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Calibrate a run: scale its noise and the temperature of its outputs, by the NLL of held-out examples.

    A noise scale of 0 is the network at the mean, above 1 there is more uncertainty than training found; a
    temperature above 1 makes class probabilities less sure. For regression, a factor on the noise of the targets takes
    its place.

        credo calibrate runs/first
        credo calibrate runs/first --recalibrate auto
        credo evaluate runs/first

    The choice is stored in the run, and `credo predict`, `evaluate` and `report` apply it. Nothing is trained. Where
    cross-fitting finds no gain, the run stays as it is. `credo train … training.calibrate=true` does it at once.
    """
    with errors_explained():
        use_model_of(model, folder)
        run = Run(folder, device=device)
        record = calibrate_run(run, rows=rows.value, draws=draws, seed=seed, recalibration=recalibrate)
        if as_json:
            print_json(record)
            return
        table = [
            [f"{where} {name}".replace("nll", "NLL").replace("ece", "ECE"), value, record["after"][where][name]]
            for where, scores in record["before"].items()
            for name, value in scores.items()
        ]
        found = record["calibration"]
        table.insert(0, [f"{rows.value} NLL, cross-fitted", found["nll_before"], found["nll_after"]])
        print_table(f"{folder}: calibrated on {found['rows']} {rows.value} examples", ["", "before", "after"], table)
        say(_changed(found))
        if "recalibration" in found:
            say(_mapped(found["recalibration"]))
        say(f"written to {run.folder / MODEL}")


def _changed(found: dict[str, Any]) -> str:
    """What the calibration does, in words."""
    names = {"noise_scale": "scale of the noise", "temperature": "temperature", "std_factor": "factor on the std"}
    changes = [f"{text} {found[name]:.3g}" for name, text in names.items() if found[name] != 1.0]
    return f"chosen: {', '.join(changes)}" if changes else "no calibration lowers the NLL of rows it was not chosen on"


def _mapped(found: dict[str, Any]) -> str:
    """What the recalibration does, in words."""
    tried = ", ".join(f"{kind} {nll:.4g}" for kind, nll in found["tried"].items())
    if len(found["tried"]) == 1:
        return f"no map after it: {found['rows']} examples are too few to try one"
    return f"map after it: {found['kind']} (cross-fitted NLL: {tried})"
