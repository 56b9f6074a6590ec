"""Metrics of the tables, their best values, and the significance of differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from credo.evaluate import (
    Interval,
    auroc,
    bootstrap,
    bootstrap_metric,
    brier_each,
    correct,
    ece,
    paired_difference,
)
from credo.predict import ClassPrediction, Prediction, RegressionPrediction

RESAMPLES = 200  # for metrics that are not means: one evaluation each


@dataclass(frozen=True)
class Metric:
    """A column of the table: `key` in the metrics, and whether `"high"` or `"low"` values are better."""

    key: str
    title: str
    better: Literal["high", "low"]
    kind: Literal["fraction", "number", "count", "seconds"]
    hint: str


CLASS_METRICS = (
    Metric("accuracy", "Accuracy", "high", "fraction", "fraction of correct predictions"),
    Metric("nll", "NLL", "low", "number", "negative log-likelihood, nats"),
    Metric("ece", "ECE", "low", "number", "expected calibration error"),
    Metric("brier", "Brier", "low", "number", "squared error of the probabilities"),
)
VALUE_METRICS = (
    Metric("rmse", "RMSE", "low", "number", "root mean squared error"),
    Metric("nll", "NLL", "low", "number", "negative log density, nats"),
    Metric("crps", "CRPS", "low", "number", "continuous ranked probability score"),
)
COSTS = (
    Metric("parameters", "Parameters", "low", "count", "parameters needed for prediction: weights and their posterior"),
    Metric("seconds", "Training", "low", "seconds", "training time of all epochs"),
)


def metrics_of(task: str, ood: Mapping[str, Any]) -> list[Metric]:
    """Quality metrics for a task, with the AUROC of each out-of-distribution set in `ood`."""
    if task == "regression":
        return list(VALUE_METRICS)
    detection = [
        Metric(f"ood {name}", f"OOD AUROC ({name})", "high", "number", "OOD detection by predictive entropy")
        for name in ood
    ]
    return [*CLASS_METRICS, *detection]


def value_of(metrics: Mapping[str, Any], key: str) -> float:
    """Value of the column `key`."""
    if key.startswith("ood "):
        return float(metrics["ood"][key.removeprefix("ood ")]["entropy"]["auroc"])
    return float(metrics[key])


def best_of(values: list[float | None], better: str) -> set[int]:
    """Indices of the best value: several if tied, none if all are equal."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(values) < 2 or not known or min(known) == max(known):
        return set()
    best = max(known) if better == "high" else min(known)
    return {index for index, value in enumerate(values) if value == best}


def further_intervals(prediction: Prediction, ood: Mapping[str, ClassPrediction]) -> dict[str, list[float]]:
    """95 % intervals that `measure` does not give: of the CRPS, and of OOD detection by entropy."""
    if isinstance(prediction, RegressionPrediction):
        found = bootstrap(prediction.crps())
        return {"crps": [found.low, found.high]}
    assert isinstance(prediction, ClassPrediction)
    intervals = {}
    for name, other in ood.items():
        found = _resampled(_auroc, *_scores(other.total, prediction.total))
        intervals[f"ood {name}"] = [found.low, found.high]
    return intervals


def difference(key: str, ours: Any, theirs: Any, ood: tuple[Any, Any] | None = None) -> Interval:
    """Difference of a metric between two predictions on the same inputs, with interval and, for means, p-value.

    Args:
        key: Key of the metric.
        ours: Prediction whose metric is the minuend.
        theirs: Prediction whose metric is subtracted.
        ood: Both predictions on the out-of-distribution inputs of an "ood" key.
    """
    if key.startswith("ood "):
        assert ood is not None
        inner, outer = (torch.stack([a.total, b.total], -1) for a, b in ((ours, theirs), ood))
        return _resampled(lambda s, y: _auroc(s[:, 0], y) - _auroc(s[:, 1], y), *_scores(outer, inner))
    if key == "ece":
        classes, both = ours.probs.shape[-1], torch.cat([ours.probs, theirs.probs], -1)
        return _resampled(lambda p, y: ece(p[:, :classes], y) - ece(p[:, classes:], y), both, ours.targets)
    if key == "rmse":
        squares = torch.stack([_squares(ours), _squares(theirs)], -1)
        found = _resampled(lambda s, _: _root_difference(s), squares, squares[:, 0])
        p_value = paired_difference(squares[:, 0], squares[:, 1]).p_value
        return Interval(found.value, found.low, found.high, p_value)
    each = _EACH[key]
    return paired_difference(each(ours), each(theirs))


def judged(found: Interval, better: str) -> Literal["better", "worse", "unclear"]:
    """Whether a difference is significant at 5 %, by its interval and its p-value."""
    crosses = found.low <= 0 <= found.high
    if crosses or not math.isfinite(found.value) or (found.p_value is not None and found.p_value >= 0.05):
        return "unclear"
    return "better" if (found.value > 0) == (better == "high") else "worse"


def _resampled(metric: Callable[[Tensor, Tensor], float], values: Tensor, labels: Tensor) -> Interval:
    return bootstrap_metric(metric, values, labels, resamples=RESAMPLES)


def _scores(ood: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of both groups in one tensor, and a mask of the out-of-distribution ones."""
    is_ood = torch.cat([torch.ones(len(ood)), torch.zeros(len(test))]).bool()
    return torch.cat([ood, test]), is_ood


def _auroc(scores: Tensor, is_ood: Tensor) -> float:
    if is_ood.all() or not is_ood.any():
        return math.nan
    return auroc(scores[is_ood], scores[~is_ood])


def _squares(prediction: Any) -> Tensor:
    squares: Tensor = (prediction.mean - prediction.targets).double().square()
    return squares.reshape(len(squares), -1).mean(-1)


def _root_difference(squares: Tensor) -> float:
    ours, theirs = squares.mean(0).sqrt().tolist()
    return float(ours - theirs)


_EACH: dict[str, Callable[[Any], Tensor]] = {
    "accuracy": lambda p: correct(p.probs, p.targets).double(),
    "nll": lambda p: -p.log_likelihood.double(),
    "brier": lambda p: brier_each(p.probs, p.targets).double(),
    "crps": lambda p: p.crps(),
}
