"""The option --model of commands that load a run whose network is the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from credo.experiments.runs import MODEL, Run
from credo.models import use_own_model
from credo.models.own import is_own
from credo.training import describe

OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="FILE.py:NAME",
        help="Your own network, if the run has one: file.py:function or package.module:Class. Its code runs; what a "
        "run names itself never does.",
    ),
]


def use_model_of(model: str | None, *folders: Path) -> None:
    """Import the network of the user's own that these runs have; raises ValueError if none of them has one.

    Args:
        model: The option as given.
        *folders: Run directories.
    """
    if model is None:
        return
    names = [Run(folder).experiment().model["name"] for folder in folders]
    if not any(map(is_own, names)):
        raise ValueError(f"--model {model}: the network of the run is Credo's own {names[0]}. Omit --model.")
    specs = [describe(path)["architecture"]["spec"] for folder in folders if (path := folder / MODEL).exists()]
    names += [spec["name"] for spec in specs if spec is not None]
    use_own_model(model, *filter(is_own, names))
