"""The doctor for a run folder: its posterior, its data, its log, and optionally a plain run to compare with."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from credo.core.support.files import write_json
from credo.core.support.json_files import read_json, read_json_lines
from credo.doctor import Diagnosis, diagnose
from credo.doctor.diagnose import OnStage
from credo.experiments.config import in_order, prepare
from credo.experiments.runs import LOG, MODEL, Run
from credo.version import __version__

DIAGNOSIS = "diagnosis.json"
DRAWS, EXAMPLES = 32, 1000


def diagnose_run(
    run: Run,
    *,
    draws: int = DRAWS,
    examples: int = EXAMPLES,
    baseline: Run | None = None,
    on_stage: OnStage | None = None,
    on_unwritable: Callable[[OSError], None] | None = None,
) -> Diagnosis:
    """`diagnose` of a trained run on its own training and test data; also written to `diagnosis.json` in its folder.

    Regressions are measured in the units of training: tables are standardised.

    Args:
        run: the trained run.
        draws: weight draws; 32 settle what is judged.
        examples: training and test examples to measure on, at most; 1000 settle what is judged.
        baseline: a run of the plain network on the same data; the file says which, under `asked`.
        on_stage: called with each stage that begins.
        on_unwritable: called with the error if the file cannot be written (a folder that is read-only, a full disk).
            Without it that error is raised, and the diagnosis is lost.
    """
    posterior = run.posterior()
    other = None if baseline is None else _baseline(run, baseline)
    experiment = run.experiment()
    # The run's own model has its weights: where they began may be gone.
    prepared = prepare(replace(experiment, model={**experiment.model, "weights": None}))
    diagnosis = diagnose(
        posterior,
        prepared.loader,
        test=in_order(prepared.dataset.test),
        twin=other,
        draws=draws,
        examples=examples,
        history=read_log(run),
        on_stage=on_stage,
    )
    try:
        write_json(run.folder / DIAGNOSIS, {**diagnosis.to_dict(), "asked": asked(run, draws, examples, baseline)})
    except OSError as error:
        if on_unwritable is None:
            raise
        on_unwritable(error)
    return diagnosis


def asked(run: Run, draws: int = DRAWS, examples: int = EXAMPLES, baseline: Run | None = None) -> dict[str, Any]:
    """What a diagnosis depends on beside the run itself; the baseline's folder is relative to the run's."""
    beside = None if baseline is None else os.path.relpath(baseline.folder.resolve(), run.folder.resolve())
    return {"baseline": beside, "draws": draws, "examples": examples, "version": __version__}


def stored_diagnosis(run: Run, *, baseline: Run | None = None) -> dict[str, Any] | None:
    """An earlier diagnosis, if `diagnose_run` with this baseline and else its defaults would only repeat it.

    None if it is older than one of the models, or was made with other options or by another version.
    """
    path = run.folder / DIAGNOSIS
    models = [each.folder / MODEL for each in (run, baseline) if each is not None]
    if not path.exists() or path.stat().st_mtime < max(model.stat().st_mtime for model in models):
        return None
    found = read_json(path)
    return found if found.get("asked") == asked(run, baseline=baseline) else None


def read_log(run: Run) -> list[dict[str, Any]]:
    """The records of a run's epochs, which count from 1; none if it has no log."""
    path = run.folder / LOG
    if not path.exists():
        return []
    records = read_json_lines(path, {"epoch": int, "nll": (int, float, type(None))})
    if not records or records[0]["epoch"] != 0:
        return records
    return [{**record, "epoch": record["epoch"] + 1} for record in records]  # of a version that counted from 0


def _baseline(run: Run, baseline: Run) -> Any:
    mine, other = run.experiment().data, baseline.experiment().data
    if mine != other:
        raise ValueError(
            f"The baseline {baseline.folder} was trained on other data ({other}) than {run.folder} ({mine}): "
            "its numbers cannot be compared. Train it on the same."
        )
    return baseline.posterior()
