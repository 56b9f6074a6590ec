"""`credo data`: list, verify and download data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from credo.cli.output import errors_explained, new_app, print_json, print_table, say
from credo.core.support.progress import make_progress
from credo.data import data_status, dataset_status, download
from credo.data.files import data_roots, missing_files, missing_message
from credo.data.registry import dataset_options, find_spec
from credo.data.status import DatasetStatus

app = new_app()


@app.command("data")
def _command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A data set. Default: all of them.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file with its checksum.")] = False,
    fetch: Annotated[
        bool, typer.Option("--download", help="Download the files of NAME from their official source.")
    ] = False,
    root: Annotated[
        Path | None, typer.Option(help="Folder of the data. Default: $CREDO_DATA, else the user's cache.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """List the available data sets, verify their files, or download one.

    Experiments refer to data sets by name:

        credo data
        credo data mnist --download
        credo data mnist --verify
        credo data csv

    With NAME, also list its options, which are settings of [data]: for your own table, data.target=COLUMN and
    data.drop='["id","name"]', the columns to leave out.

    Exit code 1 if a named data set is missing or damaged.
    """
    with errors_explained():
        if fetch:
            _download(name, root)
        if name is not None:
            find_spec(name)
        found = [dataset_status(name, root, verify=verify)] if name else data_status(root, verify=verify)
        if as_json:
            print_json([_as_dict(status) for status in found])
        else:
            say(f"looking in {', then in '.join(map(str, data_roots(root)))}")
            rows = [[s.name, _state(s), _location(s)] for s in found]
            print_table("data sets", ["name", "state", "folder"], rows)
            if name:
                if found[0].files:
                    print_table(name, ["file", "bytes", "state"], _file_rows(found[0]))
                options = ", ".join(f"data.{option}" for option in dataset_options(name))
                say(f"options: {options}" if options else "options: none")
                _say_missing(found[0])
        if name and _state(found[0]) in ("missing", "corrupt"):
            raise typer.Exit(1)


def _download(name: str | None, root: Path | None) -> None:
    if name is None:
        raise ValueError("--download needs the name of a data set, such as: credo data mnist --download")
    with make_progress() as bar:
        task = bar.add_task(f"downloading {name}", total=None, text="")
        download(name, root, progress=lambda done, total: bar.update(task, completed=done, total=total))


def _location(status: DatasetStatus) -> str:
    if status.folder is not None:
        return str(status.folder)
    return "your own: data.path=…" if status.name in ("csv", "arrays", "images") else "bundled"


def _state(status: DatasetStatus) -> str:
    if any(f.state == "corrupt" for f in status.files):
        return "corrupt"
    return "present" if status.present else "missing"


def _as_dict(status: DatasetStatus) -> dict[str, object]:
    files = [{"name": f.path.name, "path": str(f.path), "size": f.size, "state": f.state} for f in status.files]
    folder = None if status.folder is None else str(status.folder)
    url = find_spec(status.name).url or None
    return {"name": status.name, "state": _state(status), "folder": folder, "url": url, "files": files}


def _file_rows(status: DatasetStatus) -> list[list[object]]:
    folder = status.folder or Path()
    return [[str(f.path.relative_to(folder)), f.size, f.state] for f in status.files]


def _say_missing(status: DatasetStatus) -> None:
    if status.folder is None or status.present:
        return
    spec = find_spec(status.name)
    say(missing_message(status.name, spec, status.folder, missing_files(spec, status.folder)))
