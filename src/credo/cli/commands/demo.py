"""`credo demo`: train several methods on bundled data and compare them in a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from credo.cli.commands.report import shown_progress
from credo.cli.device_option import TrainingDevice
from credo.cli.output import errors_explained, new_app, print_json, print_table, say
from credo.core.support.files import write_json
from credo.data import load_dataset
from credo.evaluate import auroc, sample_study
from credo.experiments.auto import auto_run
from credo.experiments.config import in_order, make_experiment
from credo.experiments.runs import Run
from credo.report import Content, gather, write_report

app = new_app()

OOD_DATA = "photo-patches"
DRAWS = 50
SAMPLES = 100

# The same network and number of epochs for all, and defaults otherwise, so that the table compares methods.
_COMMON: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [128, 128]},
    "training": {"epochs": 40, "batch_size": 64, "seed": 0, "validation": 0.1},
}
_METHODS: dict[str, dict[str, Any]] = {
    "map": {"name": "map"},
    "mc-dropout": {"name": "mc-dropout"},
    "bbb": {"name": "bbb"},
    "vogn": {"name": "vogn"},
    "noisy-kfac": {"name": "noisy-kfac"},
    "ensemble": {"name": "ensemble", "members": 5, "of": {"name": "map"}},
}
# The last row: what `credo.auto` makes of the epochs that each of the others has.
AUTO = "auto"


@app.command("demo")
def _command(
    folder: Annotated[Path, typer.Option(help="Folder of the runs and the report.")] = Path("runs/demo"),
    device: TrainingDevice = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a plain network, five Bayesian ones and what `credo auto` chooses on the bundled digits, and compare them.

    Takes a minute or two, without preparation:

        credo demo
        credo demo --folder somewhere/else

    Existing runs are not trained again. The out-of-distribution inputs are patches of photographs, whose low contrast
    alone tells them from digits: a line says how well. The last line is the path of the report, an HTML file.
    """
    with errors_explained():
        # Networks this small gain nothing from a second thread, and lose a lot on a busy machine.
        torch.set_num_threads(1)
        for name in _METHODS:
            _train(name, folder / name, device or "auto")
        _choose(folder / AUTO)
        with shown_progress() as on_progress:
            content = gather(
                [folder / name for name in (*_METHODS, AUTO)],
                ood=(OOD_DATA,),
                draws=DRAWS,
                title="Credo on handwritten digits",
                on_progress=on_progress,
                device=device,
            )
        report = write_report(content, folder / "report.html")
        if as_json:
            print_json({run.name: {**run.metrics, "seconds": run.result["seconds"]} for run in content.runs})
            say(f"the report is {report}")
            return
        _print(content)
        command = f"credo evaluate {folder / 'bbb'} --ood {OOD_DATA} --draws {DRAWS}"
        say(f"the runs are in {folder}; evaluate one with: {command}")
        typer.echo(report)


def _train(name: str, folder: Path, device: str) -> None:
    run = Run(folder, device=device)
    training = {**_COMMON["training"], "device": device}
    experiment = make_experiment({**_COMMON, "method": _METHODS[name], "training": training})
    before = run.finished
    if not before:
        say(f"training {name} …")
    for _ in run.train(experiment, draws=DRAWS):
        pass
    if not before or not (folder / "evaluation.json").exists():
        _sample(run, folder)


def _choose(folder: Path) -> None:
    """Let `credo.auto` choose, with the passes of one training."""
    if not Run(folder).finished:
        say(f"training {AUTO} …")
    before = Run(folder).finished
    auto_run(folder, make_experiment(_COMMON), on_trial=lambda _: None, passes=_COMMON["training"]["epochs"])
    if not before or not (folder / "evaluation.json").exists():
        _sample(Run(folder), folder)


def _sample(run: Run, folder: Path) -> None:
    """Write what single networks of a posterior predict beside its result."""
    study = sample_study(run.posterior(), in_order(run.dataset().test), draws=SAMPLES)
    samples = {
        "draws": len(study.accuracies),
        "lowest": study.lowest,
        "highest": study.highest,
        "mean": study.mean,
        "ensembled": study.ensembled,
        "accuracies": study.accuracies.tolist(),
    }
    write_json(folder / "evaluation.json", {**run.result()["test"], "samples": samples})


def _print(content: Content) -> None:
    rows = [
        [
            run.name,
            run.metrics["accuracy"],
            run.metrics["nll"],
            run.metrics["ece"],
            run.metrics["ood"][OOD_DATA]["entropy"]["auroc"],
            run.result["seconds"],
        ]
        for run in content.runs
    ]
    columns = ["method", "accuracy", "NLL", "ECE", "OOD AUROC", "training s"]
    print_table(f"{content.dataset.name}, {content.draws} draws; out-of-distribution inputs: {OOD_DATA}", columns, rows)
    say(_conclusion(rows))
    contrast = f"{contrast_auroc():.3f}"
    say(f"contrast alone detects these photographs with AUROC {contrast}: so that column says little about posteriors")


def contrast_auroc() -> float:
    """How well low contrast, the standard deviation over an image's pixels, tells the photographs from test digits."""
    digits, photographs = (load_dataset(name).test.x.flatten(1) for name in (_COMMON["data"]["name"], OOD_DATA))
    return auroc(-photographs.std(1), -digits.std(1))


def _conclusion(rows: list[list[Any]]) -> str:
    """The table in a sentence: the best NLL and OOD detection, compared with the deterministic network."""
    plain = rows[0]
    likely, alert = min(rows, key=lambda row: row[2]), max(rows, key=lambda row: row[4])
    first = f"lowest NLL: {likely[0]}, {likely[2]:.3f}"
    second = f"best detection of photographs: {alert[0]}, AUROC {alert[4]:.3f}"
    baseline = [f" ({plain[0]}: {plain[c]:.3f})" if row is not plain else "" for row, c in ((likely, 2), (alert, 4))]
    return f"{first}{baseline[0]}; {second}{baseline[1]}. The report shows which differences are significant."
