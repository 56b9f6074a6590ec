"""`credo continual`: learn a sequence of tasks, with each posterior as the prior of the next task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from credo.cli.device_option import TrainingDevice, device_setting
from credo.cli.output import errors_explained, new_app, print_json, print_table, say
from credo.experiments.config import assigned, read_tables, warn_of_old_names
from credo.experiments.continual import (
    HYBRID_FLOW,
    make_continual,
    make_stream_experiment,
    run_continual,
    run_stream_experiment,
)
from credo.experiments.folders import sequence_result
from credo.report.continual import NAMES, write_continual_report
from credo.report.stream import detection_facts

app = new_app()


@app.command("continual")
def _command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[EXPERIMENT.toml] [KEY=VALUE]…", help="A TOML file, and settings that override it."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--run", help="Folder. Default: runs/continual-DATA-TASKS-METHOD[-CARRY].")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; one is often fastest for small networks.")] = None,
    device: TrainingDevice = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result record as JSON.")] = False,
) -> None:
    """Learn a sequence of tasks without forgetting the earlier ones, or resume an interrupted sequence.

    The default is VOGN on five permutations of the digits. Other tasks and baselines are one setting away:

        credo continual continual.count=3 training.epochs=15
        credo continual continual.tasks=split method.name=bbb
        credo continual method.name=map continual.carry=fisher
        credo continual method.name=map continual.carry=nothing

    Sections: data, model, method and training as for `credo train`, and continual with these keys:

    - tasks: permuted (the input features in a different order for each), split (groups of classes, an output layer for
      each) or split-single (one output layer for all); count: number of tasks.
    - carry: what is kept of a task: posterior (the prior of the next task), fisher (elastic weight consolidation, for
      method.name=map and other point estimates; strength multiplies its Fisher information) or nothing (fine-tuning).
    - restart: whether each task starts from the initial weights; true by default if carry=posterior.
    - coreset: number of examples held out of each task, and trained on last, before predicting.
    - prior: standard deviation of the first prior. draws: weight draws of a prediction.
    - alone, joint: also train each task by itself, for the forward transfer; all tasks jointly, for the upper bound.

    With method.name=hybrid-flow the tasks come as a stream of batches without boundaries, which the model finds itself:

        credo continual method.name=hybrid-flow method.forgetting=replay continual.order=[0,1,0]
        credo continual method.name=hybrid-flow continual.tasks=datasets 'continual.others=["fashion-mnist"]' …
        credo continual method.name=hybrid-flow data.name=cifar10 continual.features=runs/RUN

    The table has the accuracy on every task after each task.
    """
    with errors_explained():
        tables = sequence_tables([*(arguments or []), *device_setting(device)])
        if threads is not None:
            torch.set_num_threads(max(threads, 1))
        method = tables.get("method", {})
        if isinstance(method, dict) and method.get("name") == HYBRID_FLOW:
            folder = _run_stream(tables, folder)
        else:
            folder = _run_sequence(tables, folder)
        result = sequence_result(folder)
        report = write_continual_report(result, folder / "report.html")
        if as_json:
            print_json(result)
            return
        _print(str(folder), result)
        say(f"the report is {report}")


def _run_sequence(tables: dict[str, Any], folder: Path | None) -> Path:
    given = make_continual(tables)
    names = (given.experiment.data["name"], given.continual.tasks, given.experiment.method["name"])
    carried = () if given.continual.carry == "posterior" else (given.continual.carry,)
    folder = folder or Path("runs") / "-".join(("continual", *names, *carried))
    say(f"folder: {folder}")
    for done in run_continual(given, folder):
        say(f"{done.tasks[-1]}: mean accuracy {done.summary()['accuracy']:.4f}  {done.seconds[-1]:.1f} s")
    return folder


def _run_stream(tables: dict[str, Any], folder: Path | None) -> Path:
    given = make_stream_experiment(tables)
    names = (given.data["name"], given.continual.tasks, HYBRID_FLOW, given.method.forgetting)
    folder = folder or Path("runs") / "-".join(("continual", *names))
    say(f"folder: {folder}")
    for done in run_stream_experiment(given, folder):
        score, found = done.summary()["accuracy"], len(done.events) - 1
        say(f"segment {len(done.order)}: mean accuracy {score:.4f}, changes found {found}, {done.seconds[-1]:.1f} s")
    return folder


def sequence_tables(arguments: list[str]) -> dict[str, Any]:
    """The settings of a TOML file and of KEY=VALUE, beginning with those that fit the default tasks."""
    files = [Path(a) for a in arguments if "=" not in a]
    if len(files) > 1:
        raise ValueError(f"At most one TOML file, got {', '.join(map(str, files))}. Write settings as key=value.")
    named = [a.partition("=")[2] for a in arguments if a.startswith("method.name=")]
    tables: dict[str, Any] = {} if named == [HYBRID_FLOW] else {"training": {"epochs": 30, "batch_size": 64}}
    if named in ([], ["vogn"]):
        # Settings with which the default network learns the permuted digits.
        curvature = {"damping": 0.0, "curvature": {"init": 0.1, "decay": 0.98}}
        tables["method"] = {"name": "vogn", "lr": 0.01, **curvature}
    if files:
        tables = read_tables(files[0])
    tables = assigned(tables, [a for a in arguments if "=" in a])
    warn_of_old_names(tables)
    return tables


def _print(title: str, result: dict[str, Any]) -> None:
    tasks, matrix = result["tasks"], result["matrix"]
    after = result.get("rows", tasks)
    rows = [[f"after {name}", *row, *[None] * (len(tasks) - len(row))] for name, row in zip(after, matrix, strict=True)]
    print_table(title, ["accuracy on", *tasks], rows)
    found = detection_facts(result.get("detection"))
    lines = [[NAMES[key], value] for key, value in result["summary"].items()]
    print_table("summary", ["", "value"], [*lines, *map(list, found)])
