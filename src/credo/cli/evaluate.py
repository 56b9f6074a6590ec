"""`credo evaluate`: all metrics of a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from credo.cli.output import errors_explained, print_json, say
from credo.cli.train import print_metrics
from credo.core.files import write_json
from credo.evaluate import sample_study
from credo.experiments.config import in_order
from credo.experiments.runs import Run, evaluate_run


def evaluate_command(
    run: Annotated[Path, typer.Argument(help="Folder of a trained run.")],
    ood: Annotated[
        list[str] | None, typer.Option(help="Out-of-distribution data set; may be given several times.")
    ] = None,
    draws: Annotated[int, typer.Option(help="Weight draws (the most, with --tolerance).")] = 32,
    tolerance: Annotated[
        float | None, typer.Option(help="Stop drawing for an input at this Monte-Carlo error.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Also study this many single sampled networks.")] = 0,
    bins: Annotated[int, typer.Option(help="Bins of the calibration errors.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a run on its test set: accuracy, NLL, calibration, selective prediction, OOD detection.

    With foreign inputs, with more draws, with a study of 100 single sampled networks:

        credo evaluate runs/first --ood photo-patches
        credo evaluate runs/first --draws 100 --samples 100

    The numbers are also written to RUN/evaluation.json.
    """
    with errors_explained():
        place = Run(run)
        if samples and place.dataset().classes is None:
            raise ValueError("--samples counts right labels; this run is a regression.")
        metrics = evaluate_run(place, draws=draws, tolerance=tolerance, bins=bins, ood=tuple(ood or ()))
        if samples:
            study = sample_study(place.posterior(), in_order(place.dataset().test), draws=samples)
            metrics["samples"] = {
                "draws": samples,
                "lowest": study.lowest,
                "highest": study.highest,
                "mean": study.mean,
                "ensembled": study.ensembled,
                "accuracies": study.accuracies.tolist(),
            }
        write_json(place.folder / "evaluation.json", metrics)
        if as_json:
            print_json(metrics)
            return
        print_metrics(str(run), metrics)
        say(f"written to {place.folder / 'evaluation.json'}")
