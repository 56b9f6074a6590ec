"""`credo reproduce`: the tables of a published work, ours beside theirs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from credo.cli.output import errors_explained, print_json, print_table, say
from credo.core.errors import unknown
from credo.core.files import write_json
from credo.experiments.reproduce import SCALES, STUDIES, default_folder
from credo.training.progress import make_progress


def reproduce_command(
    study: Annotated[str, typer.Argument(help="Which work; `credo reproduce list` names them.")],
    table: Annotated[
        list[int] | None, typer.Option(help="Table number; may be given several times. All by default.")
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke (a minute, bundled data), cpu (hours), paper (the full setting).")
    ] = "smoke",
    jobs: Annotated[int, typer.Option(help="Networks trained at the same time, one thread each.")] = 2,
    output: Annotated[Path | None, typer.Option(help="Folder for records; default runs/reproduce/STUDY/SCALE.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train the networks of a published table again and print our numbers beside the paper's.

    Every network has its own record and checkpoint: stop at any time, and the same command goes on from there.

        credo reproduce weight-sampling --table 1 --scale cpu
    """
    with errors_explained():
        if study == "list":
            print_table("studies", ["name", "what"], [[name, s.title] for name, s in STUDIES.items()])
            return
        if study not in STUDIES:
            raise ValueError(unknown("study", study, STUDIES))
        if scale not in SCALES:
            raise ValueError(unknown("scale", scale, SCALES))
        folder = output or default_folder(study, scale)
        tables = [_run(study, number, scale, folder, jobs) for number in table or sorted(STUDIES[study].table)]
        if as_json:
            print_json(tables)


def _run(study: str, number: int, scale: str, folder: Path, jobs: int) -> dict[str, Any]:
    chosen = STUDIES[study]
    if number not in chosen.table:
        raise ValueError(unknown(f"table of {study}", str(number), map(str, chosen.table)))
    records: dict[str, dict[str, Any]] = {}
    with make_progress() as bar:
        task = bar.add_task(f"{study} table {number}", total=chosen.count[number](scale), text="")
        for cell, record in chosen.cells[number](folder, scale=scale, jobs=jobs):
            records[cell.name] = record
            bar.update(task, advance=1, text=cell.name)
            if not bar.console.is_terminal:
                say(f"{len(records)}/{chosen.count[number](scale)} {cell.name}")
    result = chosen.table[number](records, scale)
    write_json(folder / f"table{number}.json", {"scale": scale, **asdict(result)})
    print_table(result.title, result.columns, result.rows)
    for note in result.notes:
        say(note)
    say(f"records are in {folder}")
    return asdict(result)
