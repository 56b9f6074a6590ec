"""`credo doctor`: find problems of a trained run and the arguments that fix them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from credo.cli.device_option import Device
from credo.cli.output import EXIT_FAILED, errors_explained, new_app, print_json, print_table, say_stored
from credo.cli.own_model import OwnModel, use_model_of
from credo.core.support.progress import make_progress
from credo.doctor import STAGES, Diagnosis, Finding
from credo.doctor.diagnose import OnStage
from credo.doctor.findings import SEVERITIES, score_rows
from credo.experiments.diagnosis import DIAGNOSIS, command_options, diagnose_run
from credo.experiments.runs import Run

app = new_app()

_STYLES = {"alarm": "bold red", "warning": "bold yellow", "note": "bold"}


class FailOn(StrEnum):
    """Severity from which on the command fails."""

    ALARM = "alarm"
    WARNING = "warning"


@app.command("doctor")
def _command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")],
    baseline: Annotated[
        Path | None, typer.Option(help="Run of the deterministic network (method.name=map) on the same data.")
    ] = None,
    ood: Annotated[
        list[str] | None,
        typer.Option(help="Out-of-distribution data set, to compare scores of features on; can be repeated."),
    ] = None,
    draws: Annotated[int, typer.Option(help="Weight draws.")] = 32,
    examples: Annotated[
        int, typer.Option(help="Maximum number of training and of test examples to measure on.")
    ] = 1000,
    fail_on: Annotated[
        FailOn | None, typer.Option(help="Exit with code 1 if a finding is at least this severe. Default: always 0.")
    ] = None,
    model: OwnModel = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    old: Annotated[Path | None, typer.Option("--twin", hidden=True, help="The name of --baseline in 0.1.")] = None,
) -> None:
    """Diagnose a run: what is wrong with it, if anything, and which argument to change.

    With a deterministic baseline on the same data, it also reports what the Bayesian method gained or cost:

        credo doctor runs/first
        credo train method.name=map --run runs/plain
        credo doctor runs/first --baseline runs/plain

    The diagnosis is also written to RUN/diagnosis.json, with arguments as in Python; if that fails, a warning is shown.
    The exit code is 0 whatever is found, unless --fail-on is given.
    """
    with errors_explained():
        use_model_of(model, folder)
        run = Run(folder, device=device)
        with _progress() as on_stage:
            plain = baseline or old
            other = None if plain is None else Run(plain, device=device)
            options: dict[str, Any] = {"draws": draws, "examples": examples, "baseline": other, "on_stage": on_stage}
            options["ood"] = tuple(ood or ())
            errors: list[OSError] = []
            diagnosis = diagnose_run(run, **options, on_unwritable=errors.append)
        if as_json:
            print_json(diagnosis.to_dict())
        else:
            print_diagnosis(str(folder), diagnosis, run.experiment().method)
        say_stored(run.folder / DIAGNOSIS, errors[0] if errors else None, silent=as_json)
    if fail_on is not None and _fails(diagnosis, fail_on):
        raise typer.Exit(EXIT_FAILED)


def _fails(diagnosis: Diagnosis, fail_on: FailOn) -> bool:
    serious = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    return any(finding.severity in serious for finding in diagnosis.findings)


def print_diagnosis(title: str, diagnosis: Diagnosis, method: Mapping[str, Any]) -> None:
    """Print verdict, scores, findings with advice, and layers.

    Args:
        title: Title of the tables.
        diagnosis: Result of the doctor.
        method: The run's method section, to write arguments as `credo train` takes them.
    """
    # When piped into a file, do not cut at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 200, emoji=False, highlight=False, markup=False)
    console.print(diagnosis.verdict, style="bold", soft_wrap=True)
    scores = diagnosis.measurements.get("scores")
    if scores is not None:
        data = diagnosis.measurements["data"]
        measured = f"{data['evaluated']} {'test' if data['held_out'] else 'training'} examples"
        measured += ", with other draws than those of `credo evaluate`"
        print_table(f"{title}: scores on {measured}", ["", scores["metric"], "NLL"], score_rows(scores))
    for finding in diagnosis.findings:
        console.print(_text(finding, method), soft_wrap=True)
    if diagnosis.layers:
        rows = [
            [layer["name"], *(_short(layer[k]) for k in ("snr", "std_ratio", "collapsed"))]
            for layer in diagnosis.layers
        ]
        print_table(f"{title}: layers", ["layer", "|mean|/std", "std/prior std", "collapsed to the prior"], rows)


def _text(finding: Finding, method: Mapping[str, Any]) -> Text:
    text = Text.assemble((finding.severity, _STYLES[finding.severity]), f"  {finding.name}\n", f"  {finding.text}\n")
    text.append(f"  → {finding.advice}\n")
    options = command_options(finding.to_dict(), method)
    if options:
        text.append(f"  → {options}\n", style="bold cyan")
    return text


def _short(value: Any) -> str | None:
    return None if value is None else f"{value:.3g}"


@contextmanager
def _progress() -> Iterator[OnStage]:
    with make_progress() as bar:
        task = bar.add_task("examining", total=len(STAGES), text="")

        def _on_stage(stage: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, text=stage)

        yield _on_stage
