"""`credo export`: write a run as a file that predicts without Credo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from credo.cli.device_option import Device
from credo.cli.output import errors_explained, new_app, print_json, say
from credo.cli.own_model import OwnModel, use_model_of
from credo.data import as_float
from credo.data.tables.columns import Columns
from credo.experiments.runs import Run
from credo.exporting import export

app = new_app()
_EXAMPLES = 4


@app.command("export")
def _command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")],
    output: Annotated[Path, typer.Argument(metavar="FILE", help="model.onnx (ONNX) or model.pt2 (torch.export).")],
    draws: Annotated[
        int | None,
        typer.Option(help="Networks in the file; its size grows with them. Default: 16, or none if none are needed."),
    ] = None,
    mean: Annotated[bool, typer.Option("--mean", help="The network at the mean alone, without draws.")] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="Round weights to eight bits: an .onnx file with --mean, a quarter as large.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    model: OwnModel = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a trained run as an ONNX graph or a torch.export program, which predicts without Credo.

    The file holds networks that are drawn once, or the closed form of a last layer's predictions. Its outputs are
    probs (or mean), total, aleatoric and epistemic, as `credo predict` prints them; input scaling and calibration
    are inside, standardisation of a table's columns is not: the command prints their means and scales.

        credo export runs/first model.onnx --draws 16

    The file is compared with torch before the command ends. ONNX needs `pip install 'credo[export]'`.
    """
    with errors_explained():
        use_model_of(model, folder)
        run = Run(folder, device=device)
        posterior, split = run.posterior(), run.dataset().test
        example = as_float(split.x[:_EXAMPLES])
        path = export(posterior, example, output, draws=draws, mean=mean, seed=seed, int8=int8)
        scales = _scales(run)
        if as_json:
            print_json({"file": str(path), "bytes": path.stat().st_size, "draws": 0 if mean else draws, **scales})
            return
        equal = "within a tenth of torch, as eight bits allow" if int8 else "equal to torch"
        say(f"written to {path} ({path.stat().st_size / 2**20:.1f} MB), and {equal}")
        for note in _scale_notes(scales):
            say(note)


def _scales(run: Run) -> dict[str, Any]:
    """What the file does not do: names, means and scales of a table's inputs and target; {} for other data."""
    facts = run.facts()
    if facts["columns"] is None:
        return {}
    scales = {key: facts[key] for key in ("input_mean", "input_std", "target_mean", "target_std")}
    return {"inputs": list(Columns.from_dict(facts["columns"]).input_names), **scales}


def _scale_notes(scales: Mapping[str, Any]) -> Iterator[str]:
    if not scales:
        return
    yield "the file takes the table's columns standardised, (x - mean) / std, as float32, in this order:"
    for name, mean, std in zip(scales["inputs"], scales["input_mean"], scales["input_std"], strict=True):
        yield f"  {name}: mean {mean!r}, std {std!r}"
    if scales["target_mean"] is not None:
        target = f"mean {scales['target_mean']!r}, std {scales['target_std']!r}"
        yield f"its outputs are standardised, too: multiply by std, and add the mean to mean; the target's {target}"
