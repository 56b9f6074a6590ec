"""`python -m reproductions queue`: list, run, status and page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from credo.cli.output import EXIT_FAILED, errors_explained, print_json, print_table, say
from reproductions import queue_rows
from reproductions.queue import Queue, Row, Status, shown_minutes, summary, write_page
from reproductions.quiet import benchmark_runs, only_queue, paused_while

HELP = """Train the rows of the tables that take hours, one after another in the background.

The rows and their order are in reproductions/queue_rows.py. To begin:

    python -m reproductions queue list
    nohup python -m reproductions queue run > queue.log 2>&1 &
    python -m reproductions queue status

One row at a time, on one thread and with the lowest priority. Stop it at any time: the next `queue run` resumes from
the last checkpoint, with the same numbers. It pauses while a benchmark (`python -m benchmarks.…`) measures.
"""
WORK, RESULTS, PAGE = Path("runs") / "reproduce", Path("results"), Path("reproductions") / "QUEUE.md"
queue_app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")

Work = Annotated[Path, typer.Option("--output", help="Folder of checkpoints, as that of the papers' commands.")]
Results = Annotated[Path, typer.Option(help="Folder that gets the finished records.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Page = Annotated[Path, typer.Option(help="The page to write.")]


@queue_app.command("list")
def list_command(work: Work = WORK, results: Results = RESULTS, as_json: AsJson = False) -> None:
    """List all rows in their order, with state and minutes of one core (≈: of the same row with another seed)."""
    with errors_explained():
        statuses = _queue(work, results).statuses()
        if as_json:
            print_json([_fields(status) for status in statuses])
        else:
            rows = [[s.row.name, s.state, shown_minutes(s), s.note] for s in statuses]
            print_table("queue", ["row", "state", "min", "note"], rows)


@queue_app.command("status")
def status_command(work: Work = WORK, results: Results = RESULTS, as_json: AsJson = False) -> None:
    """Show how many rows are done, failed and planned, their hours, and which one is running."""
    with errors_explained():
        statuses = _queue(work, results).statuses()
        counts = summary(statuses)
        shown = [status for status in statuses if status.state in ("running", "failed")]
        if as_json:
            print_json({"states": counts, "rows": [_fields(status) for status in shown]})
            return
        rows = [[state, str(found["rows"]), f"{found['hours']:.1f}"] for state, found in counts.items()]
        print_table("queue", ["state", "rows", "hours"], rows)
        for status in shown:
            say(f"{status.row.name} {status.state}: {status.note}")


@queue_app.command("page")
def page_command(work: Work = WORK, results: Results = RESULTS, page: Page = PAGE) -> None:
    """Write the page of all rows; `queue run` does it after every row, too."""
    with errors_explained():
        write_page(page, _queue(work, results).statuses())
        typer.echo(page)


@queue_app.command("run")
def run_command(
    rows: Annotated[
        list[str] | None,
        typer.Argument(help="Rows to run, or beginnings such as vogn or continual/split. Default: all."),
    ] = None,
    work: Work = WORK,
    results: Results = RESULTS,
    page: Page = PAGE,
    pause_file: Annotated[
        Path | None, typer.Option(help="Also pause while this file exists, for other timings than the benchmarks.")
    ] = None,
) -> None:
    """Run the rows that are not done, one at a time.

    All, or some:

        python -m reproductions queue run
        python -m reproductions queue run vogn continual/split
        python -m reproductions queue run --pause-file /tmp/timing

    A row that fails does not stop the others; it is tried again at the next call, and the exit code is 1.
    """
    with errors_explained():
        queue = _queue(work, results)
        chosen = queue.chosen(rows or [])
        with only_queue():
            lower_priority()
            failures = _run(queue, chosen, page, pause_file)
    if failures:
        raise typer.Exit(EXIT_FAILED)


def lower_priority() -> None:
    """Let every other process go first; on Windows, which has no such call, nothing is done."""
    if hasattr(os, "nice"):
        os.nice(19)


def _run(queue: Queue, rows: Sequence[Row], page: Path, pause_file: Path | None) -> int:
    def disturbs() -> bool:
        return benchmark_runs() or (pause_file is not None and pause_file.exists())

    def tell(paused: bool) -> None:
        say("paused for a timing" if paused else "resumed")

    failures = 0
    waiting = [row for row in rows if not queue.is_done(row)]
    with paused_while(disturbs, tell):
        for count, (row, error) in enumerate(queue.run(waiting), 1):
            failures += error is not None
            say(f"{count}/{len(waiting)} {row.name}: {error or 'done'}")
            write_page(page, queue.statuses())
    return failures


def _queue(work: Path, results: Path) -> Queue:
    return Queue(queue_rows.GROUPS, work, results)


def _fields(status: Status) -> dict[str, Any]:
    return {"row": status.row.name, "state": status.state, "minutes": status.minutes, "note": status.note}
