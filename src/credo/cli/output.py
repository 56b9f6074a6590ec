"""Shared by all commands: tables and JSON on stdout, everything else on stderr, errors without traceback."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from credo.core.distributed.rendezvous import is_first_to_print
from credo.core.errors import CredoError, CredoWarning
from credo.core.support.files import finite
from credo.data import DownloadError

EXIT_FAILED, EXIT_USAGE = 1, 2


def new_app() -> typer.Typer:
    """The Typer app of one command, which `credo.cli.app` loads when it is needed."""
    return typer.Typer(add_completion=False, rich_markup_mode="markdown")


def notes() -> Console:
    """Console on stderr for everything but results."""
    return Console(stderr=True, emoji=False)


def say(text: str) -> None:
    """Print a line on stderr."""
    notes().print(text, highlight=False, markup=False, soft_wrap=True)


def say_stored(path: Path, error: OSError | None, *, note: str = "", silent: bool = False) -> None:
    """Report on stderr where results were written, or that they could not be.

    Args:
        path: File of the results.
        error: Why it could not be written, if so; always reported.
        note: Appended to the message.
        silent: Do not report success.
    """
    if error is not None:
        say(f"warning: {path} could not be written ({error}): the results were printed but not stored.")
    elif not silent:
        say(f"written to {path}{note}")


def print_json(value: Any) -> None:
    """Print the result as JSON, the only output on stdout."""
    sys.stdout.write(json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table on stdout, with numeric columns right-aligned.

    Args:
        title: Title above the table.
        columns: Headings.
        rows: One value per column each; floats are printed with four digits, None as a dash.
    """
    table = Table(title=Text(title, style="table.title"), title_justify="left")
    shown = [[show(cell) for cell in row] for row in rows]
    for index, column in enumerate(columns):
        numbers = index > 0 and all(_is_number(row[index]) for row in shown)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in shown:
        table.add_row(*row)
    # When piped into a file, do not cut at 80 columns.
    width = None if sys.stdout.isatty() else 200
    Console(width=width, emoji=False).print(table, highlight=False, markup=False)


# Metrics whose names do not say what they are.
_LABELS = {"debiased_ece": "debiased ece (root mean square)"}


def print_metrics(title: str, metrics: dict[str, Any]) -> None:
    """Print every metric with its interval; nested metrics are named by their path."""
    intervals = _intervals(metrics)
    rows: list[list[Any]] = []
    for key, value in metrics.items():
        if key == "intervals":
            continue
        for name, number in _flat(key, value):
            low, high = intervals.get(name, (None, None))
            label = _LABELS.get(name, name.replace("_", " "))
            rows.append([label, number, "" if low is None else f"{low:.4f} … {high:.4f}"])
    print_table(title, ["metric", "value", "95 % interval"], rows)


def _intervals(metrics: dict[str, Any]) -> dict[str, Any]:
    """Intervals by metric, those of nested metrics by path."""
    found = dict(metrics.get("intervals", {}))
    for key, value in metrics.items():
        if isinstance(value, dict) and key != "intervals":
            found |= {f"{key} {name}": ends for name, ends in value.get("intervals", {}).items()}
    return found


def _flat(key: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list):
        return []  # in the JSON only
    if not isinstance(value, dict):
        return [(key, value)]
    inside = {inner: entry for inner, entry in value.items() if inner != "intervals"}
    return [pair for inner, entry in inside.items() for pair in _flat(f"{key} {inner}", entry)]


def show(value: Any) -> str:
    """Format a table cell: floats with four digits, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}"
    return str(value)


def _is_number(text: str) -> bool:
    """Whether a cell starts with a number; a unit or an interval may follow."""
    return text in ("", "–") or text.lstrip("+-−±≤≥<>").lstrip()[:1].isdigit()


@contextmanager
def errors_explained() -> Iterator[None]:
    """Turn expected errors into a message and an exit code; `CREDO_DEBUG=1` shows the traceback.

    An error that all processes of torchrun share is printed by one of them.
    """
    if os.environ.get("CREDO_DEBUG"):
        yield
        return
    plain, warnings.formatwarning = warnings.formatwarning, _one_line
    try:
        yield
    except KeyboardInterrupt:
        say("Interrupted. Run the same command again to resume from the last checkpoint.")
        raise typer.Exit(130) from None
    except (CredoError, DownloadError, ValueError, TypeError, OSError) as error:
        if is_first_to_print(str(error)):
            notes().print("error:", str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        usage = isinstance(error, ValueError | FileNotFoundError)
        raise typer.Exit(EXIT_USAGE if usage else EXIT_FAILED) from None
    finally:
        warnings.formatwarning = plain


def _one_line(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> str:
    """A warning as a line: the place in the code means nothing to who types a command."""
    kind = "warning" if issubclass(category, CredoWarning) else category.__name__
    return f"{kind}: {message}\n"
