"""The option --device of commands that run a network."""

from __future__ import annotations

from typing import Annotated

import typer

Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Where the network runs: auto (an accelerator if there is one), cpu, cuda, cuda:1, mps.",
    ),
]
TrainingDevice = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps (training.device)."),
]


def device_setting(device: str | None) -> list[str]:
    """The option as a setting of an experiment, if it was given."""
    return [] if device is None else [f"training.device={device}"]
