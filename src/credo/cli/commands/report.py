"""`credo report`: compare runs in one HTML file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from credo.cli.device_option import Device
from credo.cli.ood_options import HELP, checked_scores
from credo.cli.output import errors_explained, new_app, print_json, say
from credo.cli.own_model import OwnModel, use_model_of
from credo.core.support.progress import make_progress
from credo.experiments.folders import REPORT, is_sequence, sequence_result
from credo.report import Content, gather, write_report
from credo.report.compare import judged, metrics_of
from credo.report.content import OnProgress
from credo.report.continual import write_continual_report

app = new_app()

_DRAWS, _EXAMPLES = 50, 8
_RUNS = "Folders of finished runs on the same data, or the folder of one sequence of tasks of `credo continual`."


@app.command("report")
def _command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help=_RUNS)],
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write. Default: report.html; for a sequence of tasks, in its folder."),
    ] = None,
    ood: Annotated[list[str] | None, typer.Option(help="Out-of-distribution data set; can be repeated.")] = None,
    ood_scores: Annotated[str | None, typer.Option(help=HELP)] = None,
    draws: Annotated[int | None, typer.Option(help=f"Weight draws for the predictions. Default: {_DRAWS}.")] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page. Default: data and runs.")] = None,
    examples: Annotated[
        int | None, typer.Option(help=f"Inputs to show of each kind; 0 for none. Default: {_EXAMPLES}.")
    ] = None,
    doctor: Annotated[
        bool | None, typer.Option("--doctor/--no-doctor", help="Include the findings of the doctor. Default: doctor.")
    ] = None,
    model: OwnModel = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report's numbers as JSON.")] = False,
) -> None:
    """Compare runs in one self-contained HTML file: metrics with intervals, figures, examples, findings.

    The other runs are compared with the first:

        credo report runs/plain runs/first --ood photo-patches --out report.html

    For the folder of one sequence of `credo continual`, its report is rewritten from the stored results.

    Prints the path of the file.
    """
    with errors_explained():
        if examples is not None and examples < 0:
            raise ValueError(f"--examples {examples} must be 0 or more.")
        if out is not None and out.is_dir():
            raise ValueError(f"{out} is a folder; give the file to write with --out.")
        if len(runs) == 1 and is_sequence(runs[0]):
            given = {
                "ood": ood,
                "ood-scores": ood_scores,
                "draws": draws,
                "title": title,
                "examples": examples,
                "doctor": doctor,
            }
            _report_sequence(runs[0], out, [name for name, value in given.items() if value not in (None, [])], as_json)
            return
        draws, examples = _DRAWS if draws is None else draws, _EXAMPLES if examples is None else examples
        doctor, out = doctor is not False, out or Path(REPORT)
        use_model_of(model, *runs)
        with shown_progress() as on_progress:
            sets: dict[str, Any] = {"ood": ood or (), "ood_scores": checked_scores(ood_scores, ood)}
            options: dict[str, Any] = {"draws": draws, "title": title, "doctor": doctor, "device": device}
            content = gather(runs, **sets, **options, on_progress=on_progress)
            on_progress(f"writing {out}", 1, 1)
            path = write_report(content, out, examples=examples)
        if as_json:
            print_json(as_dict(content, path))
        else:
            typer.echo(path)


def _report_sequence(folder: Path, out: Path | None, given: list[str], as_json: bool) -> None:
    """Write the report of a sequence of tasks from its stored results."""
    if given:
        names = " and ".join(f"--{name}" for name in given)
        raise ValueError(f"{folder} is a sequence of tasks, for which nothing is predicted: omit {names}.")
    result = sequence_result(folder)
    path = write_continual_report(result, out or folder / REPORT)
    if as_json:
        print_json({"report": str(path), **result})
    else:
        typer.echo(path)


@contextmanager
def shown_progress() -> Iterator[OnProgress]:
    """A progress bar on a terminal, else a line for each action."""
    with make_progress() as bar:
        task = bar.add_task("report", total=None, text="")
        last = ""

        def _on_progress(what: str, done: int, total: int) -> None:
            nonlocal last
            bar.update(task, completed=done, total=total, text=what)
            if what != last and not bar.console.is_terminal:
                say(f"{what} …")
            last = what

        yield _on_progress


def as_dict(content: Content, path: Path) -> dict[str, Any]:
    """The report's numbers: metrics of every run and their differences from the first run."""
    better = {metric.key: metric.better for metric in metrics_of(content.dataset.task, content.ood)}
    return {
        "report": str(path),
        "title": content.title,
        "data": content.dataset.name,
        "draws": content.draws,
        "runs": {
            run.name: {
                "folder": str(run.folder),
                "metrics": run.metrics,
                "intervals": run.intervals,
                **({} if run.study is None else {"ood_scores": run.study.to_dict()}),
                "differences": {
                    key: {**asdict(found), "verdict": judged(found, better[key])}
                    for key, found in run.differences.items()
                },
                "diagnosis": run.diagnosis,
            }
            for run in content.runs
        },
    }
