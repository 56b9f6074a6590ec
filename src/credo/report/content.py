"""All that a report says, before it is drawn: predictions, numbers, logs and findings of every run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from credo.core.errors import CredoError, NonFiniteError
from credo.core.parameter_counts import parameter_counts
from credo.core.support.json_files import read_json
from credo.core.support.validate import checked_count
from credo.data import Dataset, Split
from credo.evaluate import Interval, measure
from credo.experiments.config import Experiment, in_order
from credo.experiments.diagnosis import asked, diagnose_run, read_log, stored_diagnosis
from credo.experiments.runs import MODEL, Run, in_target_units, versions
from credo.predict import ClassPrediction, Prediction, predict
from credo.report.compare import difference, further_intervals, metrics_of
from credo.report.data import common_data, foreign_inputs

EVALUATION = "evaluation.json"
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RunContent:
    """One run: how it was made, how it trained, what it predicts.

    `metrics` is what `measure` gives, `differences` are those of its numbers from the first run's, `twin` is the
    name of the plain run that the doctor compared it with.
    """

    name: str
    folder: Path
    experiment: Experiment
    result: dict[str, Any]
    records: list[dict[str, Any]]
    prediction: Prediction
    outside: dict[str, Any]
    metrics: dict[str, Any]
    intervals: dict[str, list[float]]
    differences: dict[str, Interval] = field(default_factory=dict)
    samples: dict[str, Any] | None = None
    diagnosis: dict[str, Any] | None = None
    twin: str | None = None


@dataclass(frozen=True)
class Content:
    """Everything in a report; the first run is the one that others are compared with."""

    title: str
    dataset: Dataset
    foreign: dict[str, Split]
    draws: int
    runs: list[RunContent]
    made: datetime = field(default_factory=lambda: datetime.now().astimezone())
    versions: dict[str, str] = field(default_factory=versions)


def gather(
    folders: Sequence[Path | str],
    *,
    ood: Sequence[str] = (),
    draws: int = 50,
    title: str | None = None,
    doctor: bool = True,
    on_progress: OnProgress | None = None,
) -> Content:
    """Predict with every run and measure it; refuses, before anything is computed, runs that cannot be compared.

    The numbers are those of `credo evaluate` with the same number of draws. `on_progress` hears what is being done,
    and how many of how many inputs are.
    """
    draws = checked_count("draws", draws)
    runs = [Run(folder) for folder in folders]
    names = _names([run.folder for run in runs])
    results = [_result(run) for run in runs]
    dataset = common_data(runs)
    foreign = {name: foreign_inputs(name, runs[0], dataset) for name in dict.fromkeys(ood)}
    total = len(runs) * sum(len(split) for split in (dataset.test, *foreign.values()))
    done = 0
    contents = []
    for run, name, result in zip(runs, names, results, strict=True):

        def on_batch(size: int, name: str = name) -> None:
            nonlocal done
            done += size
            if on_progress is not None:
                on_progress(f"predicting with {name}", done, total)

        with _blamed_on(run.folder):
            content = _content(run, name, result, dataset, foreign, draws, on_batch)
        contents.append(content)
    first = contents[0]
    contents = [first, *(replace(run, differences=_differences(run, first)) for run in contents[1:])]
    if doctor:
        contents = [_examined(content, contents, on_progress, total) for content in contents]
    return Content(title or f"{dataset.name}: {', '.join(names)}", dataset, foreign, draws, contents)


def _result(run: Run) -> dict[str, Any]:
    run.experiment()  # says so if this is no run at all
    result = run.result()
    if not (run.folder / MODEL).exists():
        run.posterior()  # says what is missing
    return result


def _content(
    run: Run,
    name: str,
    result: dict[str, Any],
    dataset: Dataset,
    foreign: dict[str, Split],
    draws: int,
    on_batch: Callable[[int], None],
) -> RunContent:
    posterior = run.posterior()
    # Batches as in `evaluate_run`: other ones would make other draws, and slightly other numbers. Labels of foreign
    # inputs are left out: they may be of more classes than the network has.
    seen = predict(posterior, in_order(dataset.test), draws=draws, on_batch=on_batch)
    inside = in_target_units(seen, dataset)
    outside: dict[str, Any] = {
        name: predict(posterior, (x for x, _ in in_order(split)), draws=draws, on_batch=on_batch)
        for name, split in foreign.items()
    }
    metrics = measure(inside, outside=outside)
    return RunContent(
        name=name,
        folder=run.folder,
        experiment=run.experiment(),
        result={**result, "parameters": parameter_counts(posterior)},  # earlier versions counted otherwise
        records=read_log(run),
        prediction=inside,
        outside=outside,
        metrics=metrics,
        intervals={**metrics["intervals"], **further_intervals(inside, outside)},
        samples=_evaluation(run).get("samples"),
    )


def _differences(run: RunContent, first: RunContent) -> dict[str, Interval]:
    task = "classification" if isinstance(run.prediction, ClassPrediction) else "regression"
    found = {}
    for metric in metrics_of(task, run.outside):
        name = metric.key.removeprefix("ood ")
        outside = (run.outside[name], first.outside[name]) if metric.key.startswith("ood ") else None
        found[metric.key] = difference(metric.key, run.prediction, first.prediction, outside)
    return found


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parents as tell them apart."""
    if not folders:
        raise ValueError("A report needs at least one run folder.")
    whole = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, whole, strict=True):
        if whole.count(place) > 1:
            raise ValueError(f"{folder} was given twice; name every run once.")
    for depth in range(1, max(len(place.parts) for place in whole) + 1):
        names = ["/".join(place.parts[-depth:]) for place in whole]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different folders have different paths")


def _evaluation(run: Run) -> dict[str, Any]:
    """What `credo evaluate` found out about the run, unless the model is newer than that."""
    path = run.folder / EVALUATION
    if not path.exists() or path.stat().st_mtime < (run.folder / MODEL).stat().st_mtime:
        return {}
    return read_json(path)


def _examined(
    content: RunContent, others: Sequence[RunContent], on_progress: OnProgress | None, total: int
) -> RunContent:
    run, other = Run(content.folder), _twin(content, others)
    twin = None if other is None else Run(other.folder)
    found = stored_diagnosis(run, baseline=twin)
    if found is None:
        if on_progress is not None:
            on_progress(f"examining {content.name}", total, total)
        try:
            # The file only spares the work the next time: a report of runs that are read-only is as good.
            diagnosed = diagnose_run(run, baseline=twin, on_unwritable=lambda error: None)
            found = {**diagnosed.to_dict(), "asked": asked(run, baseline=twin)}
        except (CredoError, ValueError) as error:  # the rest of the report is worth having
            found = {"verdict": f"This run could not be examined: {error}"}
    return replace(content, diagnosis=found, twin=None if other is None else other.name)


def _twin(content: RunContent, others: Sequence[RunContent]) -> RunContent | None:
    """The first run of the same network as a point estimate, if there is one: the doctor can say more beside it."""
    if content.experiment.method["name"] == "map":
        return None
    for other in others:
        same = (other.experiment.data, other.experiment.model) == (content.experiment.data, content.experiment.model)
        if same and other.experiment.method["name"] == "map":
            return other
    return None


@contextmanager
def _blamed_on(folder: Path) -> Iterator[None]:
    """A complaint about values says which of several runs it is about."""
    try:
        yield
    except (ValueError, NonFiniteError) as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"{folder}: {error}") from error
