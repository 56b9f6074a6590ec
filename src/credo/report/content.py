"""Content of a report before rendering: predictions, metrics, logs and findings of every run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from credo.core.description import parameter_counts
from credo.core.errors import CredoError, NonFiniteError
from credo.core.held_out.calibration import Calibration
from credo.core.held_out.conformal import Conformal
from credo.core.support.json_files import read_json
from credo.core.support.validate import checked_count
from credo.data import Dataset, Split
from credo.detection import OodStudy
from credo.evaluate import Interval, measure
from credo.experiments.config import Experiment, in_order
from credo.experiments.diagnosis import asked, diagnose_run, read_log, stored_diagnosis
from credo.experiments.runs import MODEL, Run, in_target_units, versions
from credo.predict import ClassPrediction, DenseClassPrediction, Prediction, RegressionPrediction, predict
from credo.report.compare import difference, further_intervals, metrics_of
from credo.report.data import common_data, ood_inputs, study_of

EVALUATION = "evaluation.json"
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RunContent:
    """One run of a report.

    Args:
        name: Shortest unique name of its folder.
        folder: Run directory.
        experiment: Settings of the run.
        result: Record of the training.
        records: Training log, one record per epoch.
        prediction: Predictions on the test set.
        ood: Predictions on each out-of-distribution set.
        metrics: Result of `credo.measure`.
        intervals: 95 % intervals of the metrics.
        differences: Differences of the metrics from the first run.
        samples: Study of sampled networks by `credo evaluate --samples`, if any.
        diagnosis: Findings of the doctor, if requested.
        baseline: Name of the deterministic run that the doctor compared it with.
        calibration: What was chosen on held-out rows, which the predictions apply, if anything.
        study: Scores that detect out-of-distribution inputs, if there are such sets.
        conformal: Conformal sets or intervals, which the predictions have, if any.
    """

    name: str
    folder: Path
    experiment: Experiment
    result: dict[str, Any]
    records: list[dict[str, Any]]
    prediction: Prediction
    ood: dict[str, Any]
    metrics: dict[str, Any]
    intervals: dict[str, list[float]]
    differences: dict[str, Interval] = field(default_factory=dict)
    samples: dict[str, Any] | None = None
    diagnosis: dict[str, Any] | None = None
    baseline: str | None = None
    calibration: Calibration | None = None
    study: OodStudy | None = None
    conformal: Conformal | None = None


@dataclass(frozen=True)
class Content:
    """Everything in a report; other runs are compared with the first.

    Args:
        title: Heading of the page.
        dataset: The data that all runs share.
        ood: Out-of-distribution inputs by name of their data set.
        draws: Weight draws of the predictions.
        runs: The runs, in order.
        made: Time of creation.
        versions: Versions of credo, torch and Python.
    """

    title: str
    dataset: Dataset
    ood: dict[str, Split]
    draws: int
    runs: list[RunContent]
    made: datetime = field(default_factory=lambda: datetime.now().astimezone())
    versions: dict[str, str] = field(default_factory=versions)


def gather(
    folders: Sequence[Path | str],
    *,
    ood: Sequence[str] = (),
    ood_scores: Sequence[str] = (),
    draws: int = 50,
    title: str | None = None,
    doctor: bool = True,
    on_progress: OnProgress | None = None,
    device: str | None = None,
) -> Content:
    """Predict with every run and compute its metrics, those of `credo evaluate` with the same number of draws.

    Raises ValueError, before anything is computed, if the runs cannot be compared.

    Args:
        folders: Run directories; the first run is the reference of the comparison.
        ood: Names of out-of-distribution data sets.
        ood_scores: Scores of logits and features to detect them by, beside those of the predictions; they need passes
            over training examples.
        draws: Weight draws of the predictions.
        title: Heading of the page; None for data and runs.
        doctor: Whether to include the doctor's findings.
        on_progress: Called with (current action, inputs done, inputs in total).
        device: Where the networks run, by name; None: on the CPU.
    """
    draws = checked_count("draws", draws)
    runs = [Run(folder, device=device) for folder in folders]
    names = _names([run.folder for run in runs])
    results = [_result(run) for run in runs]
    dataset = common_data(runs)
    ood_sets = {name: ood_inputs(name, runs[0], dataset) for name in dict.fromkeys(ood)}
    total = len(runs) * sum(len(split) for split in (dataset.test, *ood_sets.values()))
    done = 0
    contents = []
    for run, name, result in zip(runs, names, results, strict=True):

        def on_batch(size: int, name: str = name) -> None:
            nonlocal done
            done += size
            if on_progress is not None:
                on_progress(f"predicting with {name}", done, total)

        with _errors_naming(run.folder):
            content = _content(run, name, result, dataset, ood_sets, draws, on_batch)
            if ood_sets:
                if ood_scores and on_progress is not None:
                    on_progress(f"scoring features of {name}", done, total)
                predictions = (content.prediction, content.ood)
                study = study_of(run, dataset, ood_sets, predictions, scores=ood_scores, draws=draws)
                content = replace(content, study=study)
        contents.append(content)
    first = contents[0]
    contents = [first, *(replace(run, differences=_differences(run, first)) for run in contents[1:])]
    if doctor:
        contents = [_examined(content, contents, on_progress, total, device) for content in contents]
    return Content(title or f"{dataset.name}: {', '.join(names)}", dataset, ood_sets, draws, contents)


def _result(run: Run) -> dict[str, Any]:
    run.experiment()  # raises if this is not a run
    result = run.result()
    if not (run.folder / MODEL).exists():
        run.posterior()  # raises and names what is missing
    return result


def _content(
    run: Run,
    name: str,
    result: dict[str, Any],
    dataset: Dataset,
    ood_sets: dict[str, Split],
    draws: int,
    on_batch: Callable[[int], None],
) -> RunContent:
    posterior = run.posterior()
    # The batches of `evaluate_run`: others would have other draws, and slightly different numbers. Labels of OOD inputs
    # are dropped: they may have more classes than the network.
    prediction = in_target_units(predict(posterior, in_order(dataset.test), draws=draws, on_batch=on_batch), dataset)
    ood: dict[str, Any] = {
        name: predict(posterior, (x for x, _ in in_order(split)), draws=draws, on_batch=on_batch)
        for name, split in ood_sets.items()
    }
    _check_kind(prediction)
    metrics = measure(prediction, outside=ood)
    return RunContent(
        name=name,
        folder=run.folder,
        experiment=run.experiment(),
        result={**result, "parameters": parameter_counts(posterior)},  # earlier versions counted differently
        records=read_log(run),
        prediction=prediction,
        ood=ood,
        metrics=metrics,
        intervals={**metrics["intervals"], **further_intervals(prediction, ood)},
        samples=_evaluation(run).get("samples"),
        calibration=posterior.calibration,
        conformal=posterior.conformal,
    )


def _check_kind(prediction: Prediction) -> None:
    """Raise ValueError for predictions that a report has no figures for."""
    kinds = ClassPrediction | RegressionPrediction
    dense = isinstance(prediction, DenseClassPrediction)
    if not isinstance(prediction, kinds) or dense or _is_censored(prediction):
        what = "censored times" if _is_censored(prediction) else f"a {type(prediction).__name__}"
        raise ValueError(
            f"a report has figures for one class per input, values and counts, not for {what}. `credo evaluate RUN` "
            "has the metrics of this run, `credo predict RUN FILE --output out.npz` its predictions."
        )


def _is_censored(prediction: Prediction) -> bool:
    """Whether targets have a column beside the values, which errors and coverage would have to know."""
    targets = prediction.targets
    return (
        isinstance(prediction, RegressionPrediction) and targets is not None and targets.shape != prediction.mean.shape
    )


def _differences(run: RunContent, first: RunContent) -> dict[str, Interval]:
    task = "classification" if isinstance(run.prediction, ClassPrediction) else "regression"
    found = {}
    for metric in metrics_of(task, run.ood):
        name = metric.key.removeprefix("ood ")
        ood = (run.ood[name], first.ood[name]) if metric.key.startswith("ood ") else None
        found[metric.key] = difference(metric.key, run.prediction, first.prediction, ood)
    return found


def _names(folders: Sequence[Path]) -> list[str]:
    """Names of the folders, with as many parents as make them unique."""
    if not folders:
        raise ValueError("A report needs at least one run folder.")
    paths = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, paths, strict=True):
        if paths.count(path) > 1:
            raise ValueError(f"{folder} was given twice; name every run once.")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different folders have different paths")


def _evaluation(run: Run) -> dict[str, Any]:
    """Stored result of `credo evaluate`, unless the model is newer."""
    path = run.folder / EVALUATION
    if not path.exists() or path.stat().st_mtime < (run.folder / MODEL).stat().st_mtime:
        return {}
    return read_json(path)


def _examined(
    content: RunContent, others: Sequence[RunContent], on_progress: OnProgress | None, total: int, device: str | None
) -> RunContent:
    run, other = Run(content.folder, device=device), _baseline(content, others)
    baseline = None if other is None else Run(other.folder, device=device)
    found = stored_diagnosis(run, baseline=baseline)
    if found is None:
        if on_progress is not None:
            on_progress(f"examining {content.name}", total, total)
        try:
            # The file is only a cache: runs may be read-only.
            diagnosed = diagnose_run(run, baseline=baseline, on_unwritable=lambda error: None)
            found = {**diagnosed.to_dict(), "asked": asked(run, baseline=baseline)}
        except (CredoError, ValueError, TypeError) as error:  # the rest of the report is still useful
            found = {"verdict": f"This run could not be examined: {error}"}
    return replace(content, diagnosis=found, baseline=None if other is None else other.name)


def _baseline(content: RunContent, others: Sequence[RunContent]) -> RunContent | None:
    """The first MAP run of the same network on the same data, if there is one."""
    if content.experiment.method["name"] == "map":
        return None
    for other in others:
        same = (other.experiment.data, other.experiment.model) == (content.experiment.data, content.experiment.model)
        if same and other.experiment.method["name"] == "map":
            return other
    return None


@contextmanager
def _errors_naming(folder: Path) -> Iterator[None]:
    """Prefix errors about values with the run folder."""
    try:
        yield
    except (ValueError, NonFiniteError) as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"{folder}: {error}") from error
