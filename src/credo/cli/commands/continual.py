"""`credo continual`: one task after the other, yesterday's posterior as today's prior."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from credo.cli.output import errors_explained, print_json, print_table, say
from credo.experiments.config import assigned, read_tables
from credo.experiments.continual import make_continual, run_continual
from credo.experiments.folders import sequence_result
from credo.report.continual import NAMES, write_continual_report


def continual_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[EXPERIMENT.toml] [KEY=VALUE]…", help="A TOML file and changes to it."),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Folder; default runs/continual-DATA-TASKS-METHOD[-CARRY].")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; one is often fastest for small networks.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result record as JSON.")] = False,
) -> None:
    """Learn a sequence of tasks without forgetting the first, or go on with one that was interrupted.

    Without a file: five permutations of the digits with VOGN. The baselines are a change of key away:

        credo continual continual.count=3 training.epochs=15
        credo continual continual.tasks=split method.name=bbb
        credo continual method.name=map continual.carry=fisher
        credo continual method.name=map continual.carry=nothing

    Sections: data, model, method and training as for `credo train`, and continual with these keys:

    - tasks: permuted (the inputs' values in another order for each), split (the classes in groups, a last layer for
      each) or split-single (one last layer for all); count: how many tasks.
    - carry: what is kept of a task: posterior (it is the prior of the next), fisher (elastic weight consolidation, for
      method.name=map and other points; strength multiplies its Fisher information) or nothing (fine-tuning).
    - restart: whether each task begins with the first weights; by default where carry=posterior.
    - coreset: so many examples of each task are kept back, and learned last, before predicting.
    - prior: standard deviation of the first prior. draws: weight draws of a prediction.
    - alone, joint: also train each task by itself, for the forward transfer; all at once, for the upper bound.

    The table has the accuracy on every task after each.
    """
    with errors_explained():
        given = make_continual(_tables(arguments or []))
        if threads is not None:
            torch.set_num_threads(max(threads, 1))
        names = (given.experiment.data["name"], given.continual.tasks, given.experiment.method["name"])
        carried = () if given.continual.carry == "posterior" else (given.continual.carry,)
        folder = run or Path("runs") / "-".join(("continual", *names, *carried))
        say(f"folder: {folder}")
        for done in run_continual(given, folder):
            say(f"{done.tasks[-1]}: mean accuracy {done.summary()['accuracy']:.4f}  {done.seconds[-1]:.1f} s")
        result = sequence_result(folder)
        report = write_continual_report(result, folder / "report.html")
        if as_json:
            print_json(result)
            return
        _print(str(folder), result)
        say(f"the report is {report}")


def _tables(arguments: list[str]) -> dict[str, Any]:
    files = [Path(a) for a in arguments if "=" not in a]
    if len(files) > 1:
        raise ValueError(f"One TOML file at most, got {', '.join(map(str, files))}. Changes are written key=value.")
    tables: dict[str, Any] = {"training": {"epochs": 30, "batch_size": 64}}
    named = [a.partition("=")[2] for a in arguments if a.startswith("method.name=")]
    if named in ([], ["vogn"]):
        # Settings under which the default network learns the digits' permutations.
        curvature = {"damping": 0.0, "curvature_init": 0.1, "curvature_decay": 0.98}
        tables["method"] = {"name": "vogn", "lr": 0.01, **curvature}
    if files:
        tables = read_tables(files[0])
    return assigned(tables, [a for a in arguments if "=" in a])


def _print(title: str, result: dict[str, Any]) -> None:
    tasks, matrix = result["tasks"], result["matrix"]
    rows = [[f"after {name}", *row, *[None] * (len(tasks) - len(row))] for name, row in zip(tasks, matrix, strict=True)]
    print_table(title, ["accuracy on", *tasks], rows)
    print_table("summary", ["", "value"], [[NAMES[key], value] for key, value in result["summary"].items()])
