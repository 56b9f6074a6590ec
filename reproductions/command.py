"""`python -m reproductions`: one command for each paper, `list`, `figure` and `queue`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from credo.cli.output import errors_explained, print_json, print_table, say
from credo.core.distributed.setup import leave
from credo.core.errors import unknown
from credo.core.kernels.denormals import flush_denormals
from credo.core.support.progress import make_progress
from reproductions.figures import FIGURES
from reproductions.jobs import Records
from reproductions.queue_command import queue_app
from reproductions.studies import STUDIES
from reproductions.study import SCALES, ResultTable, Study, Table, finish_table

SUFFIXES = (".png", ".svg", ".pdf")
# In all help texts, a line that is not indented must follow the examples: typer would indent those less.
HELP = """Train the networks of a published table again, and print our numbers beside the paper's.

To begin, on bundled data:

    python -m reproductions list
    python -m reproductions vogn --rows lenet5-vogn
    python -m reproductions figure boundary --scale smoke

Every paper is a command, whose --help describes its tables; reproductions/PAPER/README.md shows the results.
"""
STUDY_HELP = """{title}.

Tables, by their numbers in the paper or by name:

{tables}

All of them, or one:

    python -m reproductions {name} --scale smoke
    python -m reproductions {name} --table {table} --scale cpu

Every network has its own record and checkpoint: stop at any time, and the same command resumes. With --rows or --data
and no --table, only the tables that take them are run. A table shows all of its rows that have records in the folder.
"""


def main() -> None:
    """Run the command line."""
    flush_denormals()
    make_app(STUDIES)()


def make_app(studies: Mapping[str, Study]) -> typer.Typer:
    """Build the command line.

    Args:
        studies: The studies by command name.
    """
    app = typer.Typer(
        name="python -m reproductions",
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        result_callback=lambda result, **options: leave(),
    )
    for name, study in studies.items():
        tables = "\n".join(f"- {key}: {table.about}" for key, table in study.tables.items())
        text = STUDY_HELP.format(title=study.title, tables=tables, name=name, table=next(iter(study.tables)))
        app.command(name, help=text, short_help=study.title)(_study_command(name, study))

    @app.command("list")
    def list_command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
        """List the papers and their tables."""
        if as_json:
            print_json({name: study.title for name, study in studies.items()})
        else:
            rows = [[name, ", ".join(study.tables), study.title] for name, study in studies.items()]
            print_table("papers", ["name", "tables", "title"], rows)

    app.command("figure")(figure_command)
    app.add_typer(queue_app, name="queue", short_help="Train the rows that take hours, one after another")
    return app


def _study_command(name: str, study: Study) -> Callable[..., None]:
    def command(
        table: Annotated[
            list[str] | None, typer.Option(help="Table to run; may be given several times. Default: all.")
        ] = None,
        rows: Annotated[
            str | None, typer.Option(help="Rows to run, separated by commas, of tables that have them to select.")
        ] = None,
        data: Annotated[
            str | None, typer.Option(help="Run on these data instead, if a table can: imagenet (node-bnn).")
        ] = None,
        root: Annotated[Path | None, typer.Option(help="Folder of --data, with train/CLASS/ and val/CLASS/.")] = None,
        scale: Annotated[
            str,
            typer.Option(help="Preset: smoke (a minute, bundled data), cpu (hours), paper (settings of the paper)."),
        ] = "smoke",
        jobs: Annotated[int, typer.Option(help="Networks trained at the same time, one thread each.")] = 2,
        output: Annotated[
            Path | None, typer.Option(help="Folder for records. Default: runs/reproduce/PAPER/SCALE.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        with errors_explained():
            if scale not in SCALES:
                raise ValueError(unknown("scale", scale, SCALES))
            selection = _selection(name, study, rows, data, root)
            keys = _selected_tables(name, study, table or [], selection)
            folder = output or Path("runs") / "reproduce" / name / scale
            results: dict[str, ResultTable] = {}
            records: Records = {}
            for key in sorted(keys, key=lambda key: not study.tables[key].first):
                _run(f"{name} {key}", study.tables[key], folder, scale, jobs, selection)
                of_data = {option: value for option, value in selection.items() if option != "rows"}
                results[key], found = finish_table(study.tables[key], key, folder, scale, **of_data)
                records |= found
                say(f"records are in {folder}")
            _draw_figures(study, records, scale, folder)
            if as_json:
                print_json([asdict(results[key]) for key in keys])
                return
            for result in (results[key] for key in keys):
                print_table(result.title, result.columns, result.rows)
                for note in result.notes:
                    say(note)

    return command


def _selection(name: str, study: Study, rows: str | None, data: str | None, root: Path | None) -> dict[str, Any]:
    """Return --rows, --data and --root as arguments of `Table.stages`, without those not given."""
    selection: dict[str, Any] = {}
    if data is not None:
        known = {other for table in study.tables.values() for other in table.data}
        if data not in known:
            raise ValueError(unknown(f"data of {name}", data, known))
        selection = {"data": data, "root": None if root is None else str(root)}
    elif root is not None:
        raise ValueError(f"--root {root} belongs to --data; other data sets are found by CREDO_DATA.")
    if rows is None:
        return selection
    if all(table.all_rows is None for table in study.tables.values()):
        raise ValueError(f"--rows {rows}: {name} has no rows to select; its tables are run as a whole.")
    names = tuple(row.strip() for row in rows.split(",") if row.strip())
    if not names:
        raise ValueError(f"--rows {rows!r} names no row: give names separated by commas, or omit it.")
    return {**selection, "rows": names}


def _selected_tables(name: str, study: Study, wanted: list[str], selection: dict[str, Any]) -> list[str]:
    """Return the tables to run: those named, which must take the selection, or else all that take it."""
    for key in wanted:
        if key not in study.tables:
            raise ValueError(unknown(f"table of {name}", key, study.tables))
    options = [f"--{option}" for option in ("rows", "data") if option in selection]
    able = [key for key, table in study.tables.items() if _takes(table, selection)]
    if not able:
        raise ValueError(f"No table of {name} takes {' and '.join(options)} of this value: give one of them.")
    for key in wanted:
        if key not in able:
            raise ValueError(
                f"Table {key} of {name} does not take {' and '.join(options)}; tables that do: {', '.join(able)}. Name "
                f"only these, or omit {' and '.join(options)}."
            )
    return wanted or [key for key in able if not study.tables[key].on_request]


def _takes(table: Table, selection: dict[str, Any]) -> bool:
    fits = "data" not in selection or selection["data"] in table.data
    return fits and ("rows" not in selection or table.all_rows is not None)


def _run(title: str, table: Table, folder: Path, scale: str, workers: int, selection: dict[str, Any]) -> None:
    total, done = table.count(scale, **selection), 0
    with make_progress() as bar:
        task = bar.add_task(title, total=total, text="")
        for job, _ in table.run(folder, scale=scale, workers=workers, **selection):
            done += 1
            bar.update(task, advance=1, text=job.name)
            if not bar.console.is_terminal:
                say(f"{done}/{total} {job.name}")


def _draw_figures(study: Study, records: Records, scale: str, folder: Path) -> None:
    for path in study.figures(records, scale, folder) if study.figures else ():
        say(f"figure {path}")


def figure_command(
    name: Annotated[str, typer.Argument(help="The figure, or `list`.")],
    out: Annotated[Path | None, typer.Option(help="The file to write, .png, .svg or .pdf. Default: NAME.png.")] = None,
    scale: Annotated[str, typer.Option(help="Preset: smoke (seconds), cpu (a minute or two), paper.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of data, networks and draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figure's numbers as JSON.")] = False,
) -> None:
    """Train the networks of a figure and draw it.

    By name:

        python -m reproductions figure list
        python -m reproductions figure boundary --out boundary.png
        python -m reproductions figure uncertainty --scale smoke --out uncertainty.svg

    `uncertainty` is split into aleatoric and epistemic: during training, by class, of out-of-distribution images and of
    a rotated digit; --scale paper needs MNIST, Fashion-MNIST and notMNIST. Prints the path of the file. The same seed
    gives the same picture.
    """
    with errors_explained():
        if name == "list":
            _list_figures(as_json)
            return
        if name not in FIGURES:
            raise ValueError(unknown("figure", name, FIGURES))
        figure, path = FIGURES[name], out or Path(f"{name}.png")
        if scale not in figure.scales:
            raise ValueError(unknown("scale", scale, figure.scales))
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"--out {path}: the name must end in {', '.join(SUFFIXES)}.")
        # A second thread gains nothing with networks this small, and with one the picture is the same everywhere.
        torch.set_num_threads(1)
        say(f"training for {name} …")
        arrays = figure.compute(**figure.scales[scale], seed=seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.draw(arrays, path)
        if as_json:
            print_json({"figure": str(path), "scale": scale, "seed": seed, "panels": figure.numbers(arrays)})
        else:
            typer.echo(path)


def _list_figures(as_json: bool) -> None:
    titles = {name: figure.title for name, figure in FIGURES.items()}
    if as_json:
        print_json(titles)
    else:
        print_table("figures", ["name", "title"], list(titles.items()))
