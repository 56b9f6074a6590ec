"""`credo prune`: remove weights or units of a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from credo.cli.device_option import Device
from credo.cli.output import errors_explained, new_app, print_json, print_table, say
from credo.cli.own_model import OwnModel, use_model_of
from credo.experiments.pruning import SWEEP, prune_run, sweep_run
from credo.experiments.runs import Run

app = new_app()

_NAMES = {
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "nll": "NLL",
    "parameters": "parameters",
    "kept": "nonzero parameters",
    "file_bytes": "file size (bytes)",
    "forward_seconds": "forward pass (ms)",
}
_SWEEP_NAMES = {"kept": "nonzero weights"}

Scope = Annotated[
    str,
    typer.Option(
        help="global: rank all weights together, so that some layers lose more than others; layer: rank within each "
        "layer, so that all lose the same fraction."
    ),
]
Structure = Annotated[
    str,
    typer.Option(
        help="weights: set single weights to zero, and keep the network's shape; units: whole units (channels of a "
        "convolution) with their biases and outgoing weights, which --compact can then remove."
    ),
]


@app.command("prune")
def _command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")],
    rate: Annotated[
        float | None,
        typer.Option(help="Fraction of the weights (or units) to prune. Default: 0.75.", show_default=False),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Instead of a rate: prune everything that scores below this.")
    ] = None,
    by: Annotated[str, typer.Option(help="Score: snr (|mean|/std) or magnitude (|mean|).")] = "snr",
    scope: Scope = "global",
    structure: Structure = "weights",
    compact: Annotated[bool, typer.Option("--compact", help="Also remove units whose weights are all zero.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the pruned run. Default: RUN-pruned.")] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="RATES", help="Only evaluate these rates, such as 0,0.5,0.75, without writing a run."),
    ] = None,
    draws: Annotated[int, typer.Option(help="Weight draws for the test metrics.")] = 32,
    model: OwnModel = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prune a run: set its least informative weights to exactly zero, permanently.

    First find a rate with --sweep, then write a pruned run, or one with a smaller network:

        credo prune runs/first --sweep 0,0.25,0.5,0.75,0.9
        credo prune runs/first --rate 0.75 --out runs/pruned
        credo prune runs/first --by magnitude --threshold 0.01
        credo prune runs/first --rate 0.5 --structure units --compact --out runs/small

    Nothing is retrained. A pruned run works like any other with `credo evaluate` and `credo predict`.
    """
    with errors_explained():
        use_model_of(model, folder)
        run = Run(folder, device=device)
        options: dict[str, Any] = {"by": by, "scope": scope, "structure": structure}
        if threshold is not None and (rate is not None or sweep is not None):
            raise ValueError("--threshold, --rate and --sweep exclude each other: give one of them.")
        if sweep is not None:
            _check_sweep(rate, out, compact=compact)
            rows = sweep_run(run, _rates(sweep), draws=draws, **options)
            if as_json:
                print_json(rows)
                return
            names = [_SWEEP_NAMES.get(key, _NAMES.get(key, key)) for key in rows[0]]
            print_table(f"{folder}: {structure} pruned by {by}", names, [[*row.values()] for row in rows])
            say(f"written to {run.folder / SWEEP}")
            return
        target = folder.with_name(f"{folder.name}-pruned") if out is None else out
        rate = 0.75 if rate is None else rate
        much: dict[str, Any] = {"rate": rate} if threshold is None else {"threshold": threshold}
        record = prune_run(run, target, compacted=compact, draws=draws, **much, **options)
        if as_json:
            print_json(record)
            return
        table = [
            [_NAMES[key], *(_cell(key, record[when][key]) for when in ("before", "after"))] for key in record["after"]
        ]
        what = f"{rate:.0%} of the {structure}" if threshold is None else f"{structure} below {threshold:g}"
        print_table(f"{folder}: {what} pruned by {by}", ["", "before", "after"], table)
        say(f"run folder: {target}")


def _check_sweep(rate: float | None, out: Path | None, *, compact: bool) -> None:
    """Raise ValueError if options are given that a sweep does not use."""
    given = {"--rate": rate is not None, "--compact": compact, "--out": out is not None}
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise ValueError(
            f"--sweep only evaluates its own rates and writes no run: {' and '.join(wrong)} "
            f"{'has' if len(wrong) == 1 else 'have'} no effect. First sweep, then prune without --sweep."
        )


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--sweep {text}: give fractions separated by commas, such as 0,0.5,0.75.") from None


def _cell(key: str, value: float) -> str | float:
    return f"{1000 * value:.2f}" if key == "forward_seconds" else value
