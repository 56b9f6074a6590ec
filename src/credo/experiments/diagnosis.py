"""The doctor for a run folder: its posterior, its data, its log, and optionally a plain run to compare with."""

from __future__ import annotations

import json
from typing import Any

from credo.core.files import write_json
from credo.doctor import Diagnosis, diagnose
from credo.doctor.diagnose import OnStage
from credo.experiments.config import in_order, prepare
from credo.experiments.runs import LOG, Run

DIAGNOSIS = "diagnosis.json"


def diagnose_run(
    run: Run,
    *,
    draws: int = 32,
    examples: int = 1000,
    twin: Run | None = None,
    on_stage: OnStage | None = None,
) -> Diagnosis:
    """`diagnose` of a trained run on its own training and test data; also written to `diagnosis.json` in its folder.

    `twin` is a run of the plain network on the same data. Regressions are measured in the units of training: tables are
    standardised.
    """
    posterior = run.posterior()
    other = None if twin is None else _twin(run, twin)
    prepared = prepare(run.experiment())
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
    write_json(run.folder / DIAGNOSIS, diagnosis.to_dict())
    return diagnosis


def read_log(run: Run) -> list[dict[str, Any]]:
    """The records of a run's epochs, which count from 1; none if it has no log."""
    path = run.folder / LOG
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not records or records[0]["epoch"] != 0:
        return records
    return [{**record, "epoch": record["epoch"] + 1} for record in records]  # of a version that counted from 0


def _twin(run: Run, twin: Run) -> Any:
    mine, other = run.experiment().data, twin.experiment().data
    if mine != other:
        raise ValueError(
            f"The twin {twin.folder} was trained on other data ({other}) than {run.folder} ({mine}): "
            "its numbers cannot be compared. Train it on the same."
        )
    return twin.posterior()
