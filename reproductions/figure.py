"""`credo figure`: a figure of a published work, drawn from networks trained here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from credo.cli.output import errors_explained, print_json, print_table, say
from credo.core.errors import unknown
from reproductions.vogn.boundary_figure import FIGURES

SUFFIXES = (".png", ".svg", ".pdf")


def figure_command(
    name: Annotated[str, typer.Argument(help="Which figure; `credo figure list` names them.")],
    out: Annotated[Path | None, typer.Option(help="The file to write, .png, .svg or .pdf; default NAME.png.")] = None,
    scale: Annotated[str, typer.Option(help="smoke (seconds), cpu (a minute or two), paper.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of data, networks and draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figure's numbers as JSON.")] = False,
) -> None:
    """Train what a figure shows and draw it.

    Figures by name:

        credo figure list
        credo figure boundary --out boundary.png
        credo figure uncertainty --scale smoke --out uncertainty.svg
        credo figure uncertainty --json

    `uncertainty` is split into aleatoric and epistemic while a network learns, by class, of foreign images and of a
    digit that turns; --scale paper needs MNIST, Fashion-MNIST and notMNIST. Prints the path of the file. The same seed
    gives the same picture.
    """
    with errors_explained():
        if name == "list":
            _list_figures(as_json)
            return
        if name not in FIGURES:
            raise ValueError(unknown("figure", name, FIGURES))
        kind, path = FIGURES[name], out or Path(f"{name}.png")
        if scale not in kind.scales:
            raise ValueError(unknown("scale", scale, kind.scales))
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"--out {path}: the name must end in {', '.join(SUFFIXES)}.")
        # Networks this small gain nothing from a second thread, and with one the picture is the same everywhere.
        torch.set_num_threads(1)
        say(f"training for {name} …")
        figure = kind.compute(**kind.scales[scale], seed=seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        kind.draw(figure, path)
        if as_json:
            print_json({"figure": str(path), "scale": scale, "seed": seed, "panels": kind.numbers(figure)})
        else:
            typer.echo(path)


def _list_figures(as_json: bool) -> None:
    titles = {name: kind.title for name, kind in FIGURES.items()}
    if as_json:
        print_json(titles)
    else:
        print_table("figures", ["name", "what"], list(titles.items()))
