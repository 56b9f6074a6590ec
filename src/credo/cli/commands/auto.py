"""`credo auto`: choose a method by measurement, in a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from credo.cli.commands.train import read_arguments
from credo.cli.device_option import TrainingDevice, device_setting
from credo.cli.output import errors_explained, new_app, print_json, print_table, say
from credo.core.held_out.evidence import HEADER, table_row
from credo.experiments.auto import auto_run
from credo.experiments.runs import RESULT

app = new_app()


@app.command("auto")
def _command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[EXPERIMENT.toml | DATA] [KEY=VALUE]…", help="As `credo train` takes them."),
    ] = None,
    folder: Annotated[Path | None, typer.Option("--run", help="Run folder. Default: runs/DATA-MODEL-auto.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Wall time, such as 90s, 10min or 2h. Default: 10,000 steps, but at most 10min."),
    ] = None,
    passes: Annotated[
        float | None, typer.Option(help="Passes over the training rows instead: the same seed, the same choice.")
    ] = None,
    trained: Annotated[bool, typer.Option("--trained", help="model.weights are trained weights.")] = False,
    latency: Annotated[int | None, typer.Option(help="Most networks that may run for one input.")] = None,
    memory: Annotated[int | None, typer.Option(help="Most bytes of the weights.")] = None,
    ood: Annotated[list[str] | None, typer.Option(help="Out-of-distribution data set; can be repeated.")] = None,
    device: TrainingDevice = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the evidence as JSON.")] = False,
) -> None:
    """Try what is possible within a budget, and keep what predicts best on held-out rows, calibrated.

        credo auto data.name=digits --budget 5min --run runs/best
        credo auto table.csv data.target=price --passes 200
        credo evaluate runs/best

    The plain network with calibration is always tried, and is the answer unless something beats it beyond noise. The
    same command resumes a run that was stopped. The choice holds for data like the validation rows.
    """
    with errors_explained():
        experiment = read_arguments([*(arguments or []), *device_setting(device)])
        where = folder or Path("runs") / f"{experiment.data['name']}-{Path(experiment.model['name']).name}-auto"
        say(f"run folder: {where}")
        if (where / RESULT).exists():
            say("this run is already finished; this is its result")
        posterior = auto_run(
            where,
            experiment,
            on_trial=say,
            budget=budget,
            passes=passes,
            trained=trained,
            latency=latency,
            memory=memory,
            ood=ood or (),
        )
        found = posterior.evidence
        if found is None:
            raise ValueError(f"{where} is a run of `credo train`, not of `credo auto`: give another --run.")
        if as_json:
            print_json(found.to_dict())
            return
        print_table(found.statement, list(HEADER), [list(table_row(row)) for row in found.rows])
        say(found.footnote)
