"""`credo summary`: number of weights and nodes of a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from credo.cli.output import errors_explained, new_app, print_json, print_table, say
from credo.cli.own_model import OwnModel, use_model_of
from credo.data.tables.columns import Columns
from credo.experiments.runs import Run
from credo.experiments.toml import parse_assignment
from credo.models import Summary, build_model, summary

app = new_app()


@app.command("summary")
def _command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Name of a network (see `credo list models`), or folder of a trained run."
        ),
    ],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Options of the network, such as classes=100.")
    ] = None,
    own: OwnModel = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count the weights and nodes of a network by layer; nodes are the inputs of linear and convolutional layers.

    By name, with options, or of a run:

        credo summary resnet50
        credo summary lenet5 inputs=[3,32,32] classes=100
        credo summary runs/first

    Layers of other types, such as BatchNorm, have weights but no nodes and are grouped by type. A network by name takes
    no memory for its weights.
    """
    with errors_explained():
        if own is not None and not Path(model).is_dir():
            raise ValueError(f"--model {own} is for a run; {model} is none. Omit --model.")
        use_model_of(own, Path(model))
        found = _sizes(model, options or [])
        if as_json:
            print_json(found.to_dict())
            return
        rows = [[layer.path, layer.kind, f"{layer.weights:,}", f"{layer.inputs:,}"] for layer in found.layers]
        rows += [["others", f"{each.count} {each.kind}", f"{each.weights:,}", "–"] for each in found.others]
        rows.append(["total", f"{len(found.layers)} layers", f"{found.weights:,}", f"{found.nodes:,}"])
        rows.append(["weights per node", "", f"{found.ratio:,.0f}" if found.nodes else "–", ""])
        print_table(found.name, ["layer", "kind", "weights", "nodes"], rows)
        say("nodes are the inputs of a layer; of a convolution, its input channels")
        if Path(model).is_dir():
            columns = Run(model).facts().get("columns")
            if columns is not None:
                say(f"inputs: {', '.join(Columns.from_dict(columns).input_names)}")


def _sizes(model: str, options: list[str]) -> Summary:
    if Path(model).is_dir():
        if options:
            raise ValueError(f"{model} is a run, whose network is fixed: omit {' '.join(options)}.")
        return summary(Run(model).posterior().model)
    given = {}
    for text in options:
        if "=" not in text:
            raise ValueError(
                f"{text!r} is not an option: give one network, followed by its options, such as hidden=[32]."
            )
        keys, value = parse_assignment(text)
        if len(keys) > 1:
            raise ValueError(f"{text!r}: options of a network have no section; write {keys[-1]}=…")
        given[keys[0]] = value
    with torch.device("meta"):
        return summary(build_model(model, **given))
