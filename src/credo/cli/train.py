"""`credo train`: one experiment into a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from credo.cli.output import errors_explained, print_json, print_table, say
from credo.experiments.config import Experiment, read_experiment
from credo.experiments.runs import Run


def train_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[EXPERIMENT.toml] [KEY=VALUE]…", help="A TOML file and changes to it."),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder; default runs/DATA-MODEL-METHOD.")] = None,
    draws: Annotated[int, typer.Option(help="Weight draws for the final test numbers.")] = 32,
    threads: Annotated[int | None, typer.Option(help="CPU threads; one is often fastest for small networks.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result record as JSON.")] = False,
) -> None:
    """Train a network into a run folder, or go on with one that was interrupted.

    Without a file: digits, an MLP and Bayes by Backprop. Change anything by key:

        credo train method.name=bbb method.lr=0.003 training.epochs=50
        credo train experiment.toml training.seed=1 --run runs/seed1

    Sections: data, model, method, training; `credo list` shows what they can name. A star marks the best epoch so
    far by validation.
    """
    with errors_explained():
        experiment = _read(arguments or [])
        if threads is not None:
            torch.set_num_threads(max(threads, 1))
        place = Run(run or default_folder(experiment))
        say(f"run folder: {place.folder}")
        before = place.finished
        for record in place.train(experiment, draws=draws):
            values = {"loss": record.loss, "nll": record.nll, **{f"val {k}": v for k, v in record.validation.items()}}
            text = "  ".join(f"{key} {value:.4f}" for key, value in values.items())
            say(f"epoch {record.epoch:>3}  {text}  {record.seconds:.1f} s{'  *' if record.best else ''}")
        if before:
            say("this run was finished already; here is its result")
        result = place.result()
        if as_json:
            print_json(result)
            return
        print_metrics(str(place.folder), result["test"])


def _read(arguments: list[str]) -> Experiment:
    files = [a for a in arguments if "=" not in a]
    if len(files) > 1:
        raise ValueError(f"One TOML file at most, got {', '.join(files)}. Changes are written key=value.")
    return read_experiment(Path(files[0]) if files else None, [a for a in arguments if "=" in a])


def default_folder(experiment: Experiment) -> Path:
    """runs/<data>-<model>-<method>."""
    names = (experiment.data["name"], experiment.model["name"], experiment.method["name"])
    return Path("runs") / "-".join(names)


def print_metrics(title: str, metrics: dict[str, Any]) -> None:
    """Every metric with its interval, nested ones by path."""
    intervals = metrics.get("intervals", {})
    rows: list[list[Any]] = []
    for key, value in metrics.items():
        if key == "intervals":
            continue
        for name, number in _flat(key, value):
            low, high = intervals.get(name, (None, None))
            rows.append([name.replace("_", " "), number, "" if low is None else f"{low:.4f} … {high:.4f}"])
    print_table(title, ["metric", "value", "95 % interval"], rows)


def _flat(key: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list):
        return []  # in the JSON only
    if not isinstance(value, dict):
        return [(key, value)]
    return [pair for inner, entry in value.items() for pair in _flat(f"{key} {inner}", entry)]
