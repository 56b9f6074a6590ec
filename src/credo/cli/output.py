"""What all commands share: tables and JSON on stdout, everything else on stderr, errors without a traceback."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from credo.core.distributed.rendezvous import is_first_to_print
from credo.core.errors import CredoError
from credo.core.support.files import finite
from credo.data import DownloadError

EXIT_FAILED, EXIT_USAGE = 1, 2


def notes() -> Console:
    """Console for everything that is not the result."""
    return Console(stderr=True, emoji=False)


def say(text: str) -> None:
    """A line on stderr."""
    notes().print(text, highlight=False, markup=False, soft_wrap=True)


def say_stored(path: Path, error: OSError | None, *, note: str = "", quiet: bool = False) -> None:
    """Where the numbers that were printed are kept, unless `quiet`; always that they are not, if `error` is why."""
    if error is not None:
        say(f"warning: {path} could not be written ({error}): the numbers were printed but are not stored.")
    elif not quiet:
        say(f"written to {path}{note}")


def print_json(value: Any) -> None:
    """The result as JSON on stdout, and nothing else there."""
    sys.stdout.write(json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on stdout; columns of numbers are right-aligned, those of text are not."""
    table = Table(title=Text(title, style="table.title"), title_justify="left")
    shown = [[show(cell) for cell in row] for row in rows]
    for index, column in enumerate(columns):
        numbers = index > 0 and all(_is_number(row[index]) for row in shown)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in shown:
        table.add_row(*row)
    # Piped into a file the table must not be cut at 80 columns.
    width = None if sys.stdout.isatty() else 200
    Console(width=width, emoji=False).print(table, highlight=False, markup=False)


def show(value: Any) -> str:
    """A cell as text: numbers with four digits, nothing as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}"
    return str(value)


def _is_number(text: str) -> bool:
    """Whether a cell begins as numbers do; it may go on with a unit or an interval."""
    return text in ("", "–") or text.lstrip("+-−±≤≥<>").lstrip()[:1].isdigit()


@contextmanager
def errors_explained() -> Iterator[None]:
    """Expected errors become one message and an exit code; `CREDO_DEBUG=1` shows the traceback.

    An error that all processes of torchrun have alike is printed by one of them.
    """
    if os.environ.get("CREDO_DEBUG"):
        yield
        return
    try:
        yield
    except KeyboardInterrupt:
        say("Stopped. Run the same command again to go on from the last checkpoint.")
        raise typer.Exit(130) from None
    except (CredoError, DownloadError, ValueError, TypeError, OSError) as error:
        if is_first_to_print(str(error)):
            notes().print("error:", str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        usage = isinstance(error, ValueError | FileNotFoundError)
        raise typer.Exit(EXIT_USAGE if usage else EXIT_FAILED) from None
