"""What the benchmarks share towards their user: options, progress on stderr, tables, the record of a run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.peers import PEERS, installed
from credo.core.errors import unknown
from credo.core.kernels.build import enabled
from credo.core.support.files import write_json

MISSING = "not installed"


def parser_for(program: str, *, what: str, epilog: str, peers: bool = True) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks; without `peers` those of other libraries and threads are missing."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{program}",
        description=what,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if peers:
        parser.add_argument(
            "--peers",
            type=names_of("peer", PEERS),
            default=list(PEERS),
            metavar="NAMES",
            help=f"other libraries to compare with: all (default), none, or some of {', '.join(PEERS)}. One that is "
            "not installed gets a row that says so",
        )
        parser.add_argument("--threads", type=count, metavar="N", help="torch's threads (default: as torch chooses)")
    parser.add_argument("--rounds", type=count, metavar="N", help="rounds; more of them narrow the spread")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write numbers, settings and versions to a file")
    parser.add_argument("--quick", action="store_true", help="a few seconds to see that all runs; numbers mean nothing")
    return parser


def names_of(kind: str, possible: Collection[str]) -> Callable[[str], list[str]]:
    """Reads a comma-separated list of names, or "all", or "none"."""

    def read(text: str) -> list[str]:
        if text in ("all", "none"):
            return list(possible) if text == "all" else []
        names = [name.strip() for name in text.split(",") if name.strip()]
        wrong = [unknown(kind, name, possible) for name in names if name not in possible]
        if wrong or not names:
            raise argparse.ArgumentTypeError(" ".join(wrong) or f"no {kind} given; possible: {', '.join(possible)}")
        return list(dict.fromkeys(names))

    return read


def count(text: str) -> int:
    """Reads a positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


@dataclass
class Run:
    """One run of a benchmark: prepares torch, and keeps what its record needs."""

    benchmark: str
    config: dict[str, Any]
    threads: int | None
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        torch.manual_seed(0)  # the peers draw from torch's global generator
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def record(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that somebody needs to judge or repeat the run."""
        return {
            "benchmark": self.benchmark,
            "config": self.config,
            "versions": versions(),
            "platform": platform.platform(),
            "processor": processor(),
            "cpu_count": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "kernels": enabled(),
            "numbers": dict(numbers),
            "seconds": time.perf_counter() - self.started,
        }

    def resumed(self, path: Path | None) -> dict[str, Any]:
        """Numbers of a record with the same settings on the same processor; none of another."""
        if path is None or not path.exists():
            return {}
        record, now = json.loads(path.read_text(encoding="utf-8")), self.record({})
        if any(record.get(key) != now[key] for key in ("config", "processor", "threads", "kernels")):
            say(f"{path} has other settings or another processor: beginning anew")
            return {}
        return dict(record["numbers"])

    def keep(self, numbers: Mapping[str, Any], path: Path | None, tables: Mapping[str, Any]) -> None:
        """Write what there is so far, if a path was given."""
        if path is not None:
            write_json(path, {**self.record(numbers), "tables": tables})

    def finish(self, numbers: Mapping[str, Any], path: Path | None, *, tables: Mapping[str, Any] | None = None) -> None:
        """Say how long it took and write the record, if a path was given, with the `tables` that pages take from it."""
        record = {**self.record(numbers), **({"tables": tables} if tables else {})}
        if path is not None:
            write_json(path, record)
            say(f"written: {path}")
        say(f"{record['seconds']:.0f} s, {record['threads']} threads on {record['cpu_count']} processors")


def versions() -> dict[str, str | None]:
    """Versions of Python, torch, Credo and the peers; None for a peer that is not installed."""
    own = {"python": platform.python_version(), "torch": torch.__version__, "credo": metadata.version("credo")}
    return own | {name: installed(name) for name in ("laplace-torch", *(p.distribution for p in PEERS.values()))}


def processor() -> str:
    """The processor's name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def as_result(columns: Sequence[str], rows: Mapping[str, Sequence[str]], notes: Sequence[str] = ()) -> dict[str, Any]:
    """A table as pages take it from a record.

    Args:
        columns: Heads of all columns but the first.
        rows: Cells by the row's name.
        notes: Lines below it.
    """
    return {"columns": ["", *columns], "rows": [[name, *row] for name, row in rows.items()], "notes": list(notes)}


def write_tables(path: Path, make: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Put tables into a record again, if there is one.

    Args:
        path: The record.
        make: Makes its tables.
    """
    if not path.exists():
        return
    record = json.loads(path.read_text(encoding="utf-8"))
    tables = make(record)
    if record.get("tables") != tables:
        write_json(path, {**record, "tables": tables})


def table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A Markdown table with aligned columns, which reads well in a terminal too."""
    cells = [["", *columns], *([name, *row] for name, row in rows.items())]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([f"{title}\n", lines[0], rule, *lines[1:], ""])


def milliseconds(value: float) -> str:
    """Three digits of a time, without an exponent."""
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def say(message: str) -> None:
    """A line of progress."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar with the time that is left, on a terminal; else one line. Call what it gives after each unit of work."""
    console = Console(stderr=True)
    if not console.is_terminal:
        say(description)
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Drawn between rounds only: a bar that redraws itself would take its time from whoever is being timed.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task(description, total=total)
        bar.refresh()

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        yield advance
