"""`credo summary`: how many weights and nodes a network has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from credo.cli.output import errors_explained, print_json, print_table, say
from credo.data.tables.columns import Columns
from credo.experiments.runs import Run
from credo.experiments.toml import parse_assignment
from credo.models import Summary, build_model, summary


def summary_command(
    model: Annotated[str, typer.Argument(help="Name of a network (`credo list models`), or folder of a trained run.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Options of the network, as classes=100.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count weights and nodes of a network, layer by layer; nodes are the inputs of Linear and Conv layers.

    By name, with options, or of a run:

        credo summary resnet50
        credo summary lenet5 inputs=[3,32,32] classes=100
        credo summary runs/first

    Layers of other types, as BatchNorm, have weights but no nodes: a row for each type. Nothing is trained, and a
    network by name takes no memory for its weights.
    """
    with errors_explained():
        found = _sizes(model, options or [])
        if as_json:
            print_json(found.to_dict())
            return
        rows = [[layer.path, layer.kind, f"{layer.weights:,}", f"{layer.inputs:,}"] for layer in found.layers]
        rows += [["others", f"{each.count} {each.kind}", f"{each.weights:,}", "–"] for each in found.others]
        rows.append(["all", f"{len(found.layers)} layers", f"{found.weights:,}", f"{found.nodes:,}"])
        rows.append(["weights a node", "", f"{found.ratio:,.0f}" if found.nodes else "–", ""])
        print_table(found.name, ["layer", "kind", "weights", "nodes"], rows)
        say("nodes are the inputs of layers, of a convolution its channels")
        if Path(model).is_dir():
            columns = Run(model).facts().get("columns")
            if columns is not None:
                say(f"inputs: {', '.join(Columns.from_dict(columns).input_names)}")


def _sizes(model: str, options: list[str]) -> Summary:
    if Path(model).is_dir():
        if options:
            raise ValueError(f"{model} is a run, its network is built already: leave out {' '.join(options)}.")
        return summary(Run(model).posterior().model)
    given = {}
    for text in options:
        if "=" not in text:
            raise ValueError(f"{text!r} is no option: give one network, and its options as hidden=[32] after it.")
        keys, value = parse_assignment(text)
        if len(keys) > 1:
            raise ValueError(f"{text!r}: options of a network have no sections; write {keys[-1]}=…")
        given[keys[0]] = value
    with torch.device("meta"):
        return summary(build_model(model, **given))
