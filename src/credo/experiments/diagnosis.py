"""Diagnose a run folder, and phrase the advice as command-line options."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from credo.core.posterior import Posterior
from credo.core.support.files import write_json
from credo.core.support.json_files import read_json, read_json_lines
from credo.doctor import Diagnosis, diagnose
from credo.doctor.diagnose import OnStage
from credo.experiments.config import in_order, prepare
from credo.experiments.runs import LOG, MODEL, Run, ood_split
from credo.version import __version__

DIAGNOSIS = "diagnosis.json"
DRAWS, EXAMPLES = 32, 1000


def diagnose_run(
    run: Run,
    *,
    draws: int = DRAWS,
    examples: int = EXAMPLES,
    baseline: Run | None = None,
    ood: Sequence[str] = (),
    on_stage: OnStage | None = None,
    on_unwritable: Callable[[OSError], None] | None = None,
) -> Diagnosis:
    """`diagnose` a trained run on its own training and test data, and write `diagnosis.json` into its folder.

    Regressions are measured in the units of training: tables are standardised.

    Args:
        run: The trained run.
        draws: Number of weight draws; 32 are enough for all rules.
        examples: Maximum number of training and of test examples to measure on; 1000 are enough for all rules.
        baseline: A run of the deterministic network on the same data; recorded in the file under `asked`.
        ood: Names of out-of-distribution data sets, on which scores of features are compared with those of predictions.
        on_stage: Called with (stage, index, number of stages).
        on_unwritable: Called with the error if the file cannot be written (a read-only folder, a full disk). Without
            it that error is raised, and the diagnosis is lost.
    """
    posterior = run.posterior()
    other = None if baseline is None else _baseline(run, baseline)
    experiment = run.experiment()
    # The trained weights are in the run; the file of the initial ones may be gone.
    prepared = prepare(replace(experiment, model={**experiment.model, "weights": None}))
    diagnosis = diagnose(
        posterior,
        prepared.loader,
        test=in_order(prepared.dataset.test),
        baseline=other,
        draws=draws,
        examples=examples,
        history=read_log(run),
        ood={name: in_order(ood_split(run.experiment(), name, prepared.dataset)) for name in ood},
        on_stage=on_stage,
    )
    try:
        write_json(run.folder / DIAGNOSIS, {**diagnosis.to_dict(), "asked": asked(run, draws, examples, baseline, ood)})
    except OSError as error:
        if on_unwritable is None:
            raise
        on_unwritable(error)
    return diagnosis


def asked(
    run: Run,
    draws: int = DRAWS,
    examples: int = EXAMPLES,
    baseline: Run | None = None,
    ood: Sequence[str] = (),
) -> dict[str, Any]:
    """Options of `diagnose_run` as recorded: `draws`, `examples`, `ood`, the path of `baseline` relative to `run`."""
    path = None if baseline is None else os.path.relpath(baseline.folder.resolve(), run.folder.resolve())
    sets = {"ood": list(ood)} if ood else {}
    return {"baseline": path, "draws": draws, "examples": examples, **sets, "version": __version__}


def stored_diagnosis(run: Run, *, baseline: Run | None = None) -> dict[str, Any] | None:
    """The stored diagnosis, if `diagnose_run` with this baseline and its other defaults would only repeat it.

    None if it is older than one of the models, or was made with other options or by another version.
    """
    path = run.folder / DIAGNOSIS
    models = [each.folder / MODEL for each in (run, baseline) if each is not None]
    if not path.exists() or path.stat().st_mtime < max(model.stat().st_mtime for model in models):
        return None
    found = read_json(path)
    return found if found.get("asked") == asked(run, baseline=baseline) else None


def command_options(finding: Mapping[str, Any], method: Mapping[str, Any]) -> str:
    """A finding's arguments as commands take them: `method.init.std=0.05`, `--draws 64`; empty if there are none.

    Args:
        finding: `Finding.to_dict()`.
        method: The run's [method] section; an ensemble keeps its members' options in `method.of`.
    """
    target, arguments = finding.get("target"), finding.get("arguments") or {}
    if target in ("predict", "diagnose"):
        values = {**arguments, **({"baseline": "runs/plain"} if "baseline" in arguments else {})}
        return " ".join(f"--{key} {value}" for key, value in values.items() if value is not None)
    section = "training" if target == "training" else "method.of" if method.get("name") == "ensemble" else "method"
    return " ".join(_assignments(section, arguments))


def _assignments(section: str, values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _assignments(f"{section}.{key}", value)
        else:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            yield f"{section}.{key}={text.lower() if isinstance(value, bool) else text}"


def read_log(run: Run) -> list[dict[str, Any]]:
    """Records of a run's epochs, counted from 1; empty if it has no log."""
    path = run.folder / LOG
    if not path.exists():
        return []
    records = read_json_lines(path, {"epoch": int, "nll": (int, float, type(None))})
    if not records or records[0]["epoch"] != 0:
        return records
    return [{**record, "epoch": record["epoch"] + 1} for record in records]  # written by a version that counted from 0


def _baseline(run: Run, baseline: Run) -> Posterior:
    mine, other = run.experiment().data, baseline.experiment().data
    if mine != other:
        raise ValueError(
            f"The baseline {baseline.folder} was trained on other data ({other}) than {run.folder} ({mine}): "
            "the two cannot be compared. Train it on the same data."
        )
    return baseline.posterior()
