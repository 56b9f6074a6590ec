"""`credo reproduce`: the tables of a published work, ours beside theirs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from credo.cli.output import errors_explained, print_json, print_table, say
from credo.core.errors import unknown
from credo.core.support.files import write_json
from credo.training.progress import make_progress
from reproductions.studies import SCALES, STUDIES, Table, default_folder


def reproduce_command(
    study: Annotated[str, typer.Argument(help="Which work; `credo reproduce list` names them.")],
    table: Annotated[
        list[str] | None,
        typer.Option(help="Table number, or its name where it has one; may be given several times. All by default."),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            help="Rows to run, by commas, where a table has them to choose: `lenet5,alexnet` or `lenet5-vogn`."
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Run on these data instead, where a study can: imagenet.")] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of --data: train/CLASS/*, val/CLASS/*.")] = None,
    scale: Annotated[
        str, typer.Option(help="smoke (a minute, bundled data), cpu (hours), paper (the full setting).")
    ] = "smoke",
    jobs: Annotated[int, typer.Option(help="Networks trained at the same time, one thread each.")] = 2,
    output: Annotated[Path | None, typer.Option(help="Folder for records; default runs/reproduce/STUDY/SCALE.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train the networks of a published table again and print our numbers beside the paper's.

    Works by name, tables by number, some with rows to choose:

        credo reproduce list
        credo reproduce weight-sampling --table 1 --scale cpu
        credo reproduce vogn --rows lenet5 --scale cpu

    The twelve perturbed test sets of weight-sampling (FOLDER/attacks/NAME.safetensors), and a table that we add:

        credo reproduce weight-sampling --table attacks --scale cpu
        credo reproduce weight-sampling --table white-box --scale cpu

    Every network has its own record and checkpoint: stop at any time, and the same command goes on from there. With
    --rows or --data and no --table, only tables that have such a choice are run. A table shows all of its rows that
    have records in the folder, whichever were asked for.
    """
    with errors_explained():
        if study == "list":
            _list_studies(as_json)
            return
        known = _known_tables(study, scale, table or [])
        folder = output or default_folder(study, scale)
        choice = _choice(study, rows, data, root)
        keys = _tables_with(study, [known[name] for name in table or []], rows, data)
        records: dict[str, dict[str, Any]] = {}
        order = sorted(keys, key=lambda key: key != STUDIES[study].together)
        done = {key: _run(study, key, scale, folder, jobs, choice, records) for key in order}
        results = [done[key] for key in keys]
        draw = STUDIES[study].figures
        for path in draw(records, scale, folder) if draw else ():
            say(f"figure {path}")
        if as_json:
            print_json([asdict(result) for result in results])
            return
        for result in results:
            print_table(result.title, result.columns, result.rows)
            for note in result.notes:
                say(note)


def _list_studies(as_json: bool) -> None:
    titles = {name: study.title for name, study in STUDIES.items()}
    if as_json:
        print_json(titles)
    else:
        print_table("studies", ["name", "what"], list(titles.items()))


def _known_tables(study: str, scale: str, wanted: list[str]) -> dict[str, int | str]:
    """The study's tables by name, once all that was named is found to exist."""
    if study not in STUDIES:
        raise ValueError(unknown("study", study, STUDIES))
    if scale not in SCALES:
        raise ValueError(unknown("scale", scale, SCALES))
    known = {str(key): key for key in STUDIES[study].table}
    for name in wanted:
        if name not in known:
            raise ValueError(unknown(f"table of {study}", name, known))
    return known


def _choice(study: str, rows: str | None, data: str | None = None, root: Path | None = None) -> dict[str, Any]:
    """What of the study is wanted, as arguments of its functions."""
    choice: dict[str, Any] = {}
    if data is not None:
        if data not in STUDIES[study].data:
            raise ValueError(unknown(f"data of {study}", data, STUDIES[study].data))
        choice = {"data": data, "root": None if root is None else str(root)}
    elif root is not None:
        raise ValueError(f"--root {root} belongs to --data; other data sets are found by CREDO_DATA.")
    if rows is None:
        return choice
    if not STUDIES[study].rows:
        raise ValueError(f"--rows {rows}: {study} has no rows to choose; its tables are run as a whole.")
    names = tuple(row.strip() for row in rows.split(",") if row.strip())
    if not names:
        raise ValueError(f"--rows {rows!r} names no row: give names by commas, or leave it out.")
    return {**choice, "rows": names}


def _tables_with(study: str, named: list[int | str], rows: str | None, data: str | None) -> list[int | str]:
    """The tables to run: those named, each of which must know what else was given; else all that do."""
    takers: dict[str, Collection[int | str]] = {}
    if rows is not None:
        takers[f"--rows {rows}"] = STUDIES[study].rows
    if data is not None:
        takers[f"--data {data}"] = STUDIES[study].data[data]
    found = [key for key in STUDIES[study].table if all(key in keys for keys in takers.values())]
    if not found:
        raise ValueError(f"{' '.join(takers)}: no table of {study} has both; give one of them.")
    for key in named:
        if key not in found:
            options = " and ".join(option.split()[0] for option in takers)
            raise ValueError(
                f"{' '.join(takers)}: table {key} of {study} has no such choice; tables that have: "
                f"{', '.join(str(other) for other in found)}. Name only these, or leave out {options}."
            )
    return named or [key for key in found if key not in STUDIES[study].aside]


def _run(
    study: str,
    key: int | str,
    scale: str,
    folder: Path,
    jobs: int,
    choice: dict[str, Any],
    every: dict[str, dict[str, Any]],
) -> Table:
    """One table; its records are also added to `every`."""
    chosen = STUDIES[study]
    name = f"table {key}" if isinstance(key, int) else key
    of_data = {option: value for option, value in choice.items() if option != "rows"}
    total = chosen.count[key](scale, **choice)
    records: dict[str, dict[str, Any]] = {}
    with make_progress() as bar:
        task = bar.add_task(f"{study} {name}", total=total, text="")
        for cell, record in chosen.cells[key](folder, scale=scale, jobs=jobs, **choice):
            records[cell.name] = record
            bar.update(task, advance=1, text=cell.name)
            if not bar.console.is_terminal:
                say(f"{len(records)}/{total} {cell.name}")
    if key in chosen.rows:  # as many rows as there are, so that a file never loses those of an earlier command
        records = chosen.rows[key](folder, scale, **of_data)
    every.update(records)
    other = {"data": choice["data"]} if "data" in choice else {}
    result = chosen.table[key](records, scale, **other)
    file = "-".join([name.replace(" ", ""), *other.values()])
    write_json(folder / f"{file}.json", {"scale": scale, **asdict(result)})
    say(f"records are in {folder}")
    return result
