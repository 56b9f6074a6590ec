"""`credo prune`: a trained run with fewer weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from credo.cli.output import errors_explained, print_json, print_table, say
from credo.experiments.pruning import SWEEP, prune_run, sweep_run
from credo.experiments.runs import Run

_NAMES = {
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "nll": "NLL",
    "parameters": "parameters",
    "kept": "of these not zero",
    "file_bytes": "file (bytes)",
    "forward_seconds": "a forward pass (ms)",
}
_SWEEP_NAMES = {"kept": "weights left"}

Scope = Annotated[
    str,
    typer.Option(
        help="global: rank all weights together, so that some layers lose more than others; layer: rank those of each "
        "layer, which all lose the same share."
    ),
]
Structure = Annotated[
    str,
    typer.Option(
        help="weights: single weights become zero, and the network keeps its shape; units: whole units (channels of a "
        "convolution) with their biases and what the next layer reads from them, which --compact can then remove."
    ),
]


def prune_command(
    run: Annotated[Path, typer.Argument(help="Folder of a trained run.")],
    rate: Annotated[
        float | None, typer.Option(help="Share of the weights (or units) that go; 0.75 by default.", show_default=False)
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Instead of a rate: all that score less than this go.")
    ] = None,
    by: Annotated[str, typer.Option(help="Score: snr (|mean|/std) or magnitude (|mean|).")] = "snr",
    scope: Scope = "global",
    structure: Structure = "weights",
    compact: Annotated[bool, typer.Option("--compact", help="Also remove units without weights.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the pruned run; default RUN-pruned.")] = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="RATES", help="Only measure at these rates, as 0,0.5,0.75; no run is written.")
    ] = None,
    draws: Annotated[int, typer.Option(help="Weight draws for the test numbers.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prune a run: set the weights that say least to zero, exactly and for good.

    First see how far one can go, then write a pruned run, or one whose network is really smaller:

        credo prune runs/first --sweep 0,0.25,0.5,0.75,0.9
        credo prune runs/first --rate 0.75 --out runs/pruned
        credo prune runs/first --by magnitude --threshold 0.01
        credo prune runs/first --rate 0.5 --structure units --compact --out runs/small

    Nothing is trained again. The pruned run is one like others: `credo evaluate` and `credo predict` take it.
    """
    with errors_explained():
        place = Run(run)
        options: dict[str, Any] = {"by": by, "scope": scope, "structure": structure}
        if threshold is not None and (rate is not None or sweep is not None):
            raise ValueError("--threshold says how much goes, as --rate and --sweep do: give one of them.")
        if sweep is not None:
            _check_sweep(rate, out, compact=compact)
            rows = sweep_run(place, _rates(sweep), draws=draws, **options)
            if as_json:
                print_json(rows)
                return
            names = [_SWEEP_NAMES.get(key, _NAMES.get(key, key)) for key in rows[0]]
            print_table(f"{run}: {structure} pruned by {by}", names, [[*row.values()] for row in rows])
            say(f"written to {place.folder / SWEEP}")
            return
        folder = run.with_name(f"{run.name}-pruned") if out is None else out
        rate = 0.75 if rate is None else rate
        much: dict[str, Any] = {"rate": rate} if threshold is None else {"threshold": threshold}
        record = prune_run(place, folder, compacted=compact, draws=draws, **much, **options)
        if as_json:
            print_json(record)
            return
        table = [
            [_NAMES[key], *(_cell(key, record[when][key]) for when in ("before", "after"))] for key in record["after"]
        ]
        what = f"{rate:.0%} of the {structure}" if threshold is None else f"{structure} below {threshold:g}"
        print_table(f"{run}: {what} pruned by {by}", ["", "before", "after"], table)
        say(f"run folder: {folder}")


def _check_sweep(rate: float | None, out: Path | None, *, compact: bool) -> None:
    """A sweep prunes copies and writes no run."""
    given = {"--rate": rate is not None, "--compact": compact, "--out": out is not None}
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise ValueError(
            f"--sweep only measures, at its own rates, and writes no run: {' and '.join(wrong)} "
            f"{'has' if len(wrong) == 1 else 'have'} no meaning beside it. First sweep, then prune without --sweep."
        )


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--sweep {text}: give shares with commas between them, as 0,0.5,0.75.") from None


def _cell(key: str, value: float) -> str | float:
    return f"{1000 * value:.2f}" if key == "forward_seconds" else value
