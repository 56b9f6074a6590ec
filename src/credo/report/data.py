"""The common test set of the runs, and the out-of-distribution sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from credo.data import Dataset, Split, load_dataset
from credo.detection import OodStudy, ood_study
from credo.experiments.config import in_order
from credo.experiments.runs import DETECTOR_DRAWS, Run
from credo.report.compare import RESAMPLES


def common_data(runs: Sequence[Run]) -> Dataset:
    """The data set of all runs; raises ValueError if their test sets differ."""
    first = runs[0]
    settings = first.experiment().data
    dataset = first.dataset()
    for run in runs[1:]:
        others = run.experiment().data
        if others != settings and not _same(dataset, run.dataset()):
            raise ValueError(
                f"{run.folder} was trained on {_described(others)}, {first.folder} on {_described(settings)}: "
                "a report compares runs on the same data. Make one report for each."
            )
    return dataset


def ood_inputs(name: str, run: Run, dataset: Dataset) -> Split:
    """Test split of an out-of-distribution data set.

    Args:
        name: Name of the data set.
        run: Run whose data folder is searched.
        dataset: In-distribution data, whose input shape must match.
    """
    if dataset.classes is None:
        raise ValueError("Out-of-distribution detection scores class probabilities; these runs are regressions.")
    other = load_dataset(name, root=run.experiment().data.get("root"))
    if other.input_shape != dataset.input_shape:
        raise ValueError(
            f"{name} has inputs of shape {other.input_shape}, the runs were trained on {dataset.input_shape}: "
            "an out-of-distribution set must have the same shape."
        )
    return other.test


def study_of(
    run: Run, dataset: Dataset, ood: Mapping[str, Split], predictions: Any, *, scores: Sequence[str], draws: int
) -> OodStudy:
    """Scores of a run that detect out-of-distribution inputs.

    Args:
        run: The run.
        dataset: In-distribution data.
        ood: Out-of-distribution inputs by name.
        predictions: Those of the test inputs and, by name, of `ood`.
        scores: Scores of logits and features beside those of the predictions.
        draws: Weight draws of the report, of which those scores use at most `DETECTOR_DRAWS`.
    """
    return ood_study(
        run.posterior(),
        run.training_batches() if scores else (),
        in_order(dataset.test),
        {name: in_order(split) for name, split in ood.items()},
        scores=scores,
        draws=min(draws, DETECTOR_DRAWS),
        predictions=predictions,
        resamples=RESAMPLES,
        progress=False,
    )


def _same(a: Dataset, b: Dataset) -> bool:
    """Whether the test sets are equal; training sets may differ."""
    same = (a.classes, a.class_names, a.input_shape, a.test.x.dtype, len(a.test)) == (
        b.classes,
        b.class_names,
        b.input_shape,
        b.test.x.dtype,
        len(b.test),
    )
    if not same or not torch.equal(a.test.x, b.test.x) or not torch.equal(a.test.y, b.test.y):
        return False
    scales = ((a.target_mean, b.target_mean), (a.target_std, b.target_std))
    return all(p is q or (p is not None and q is not None and torch.equal(p, q)) for p, q in scales)


def _described(settings: dict[str, Any]) -> str:
    options = ", ".join(f"{key}={value}" for key, value in settings.items() if key != "name" and value is not None)
    return f"{settings['name']} ({options})" if options else str(settings["name"])
