"""Which numbers a table shows, which of them is best, and which differences are more than chance."""

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
    crps_gaussian_each,
    ece,
    paired_difference,
)
from credo.predict import ClassPrediction, Prediction, RegressionPrediction

RESAMPLES = 200  # of metrics that are no means and cost a call each


@dataclass(frozen=True)
class Metric:
    """A column: `key` in the metrics, and whether `"high"` or `"low"` numbers are good."""

    key: str
    title: str
    better: Literal["high", "low"]
    kind: Literal["share", "number", "count", "seconds"]
    hint: str


CLASS_METRICS = (
    Metric("accuracy", "Accuracy", "high", "share", "share of right predictions"),
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
    Metric("parameters", "Parameters", "low", "count", "numbers that a prediction needs: weights and their spread"),
    Metric("seconds", "Training", "low", "seconds", "time of all epochs"),
)


def metrics_of(task: str, foreign: Mapping[str, Any]) -> list[Metric]:
    """The columns that belong to the quality of a run."""
    if task == "regression":
        return list(VALUE_METRICS)
    detection = [
        Metric(f"ood {name}", f"OOD AUROC ({name})", "high", "number", "foreign inputs told by their entropy")
        for name in foreign
    ]
    return [*CLASS_METRICS, *detection]


def value_of(metrics: Mapping[str, Any], key: str) -> float:
    """The number of a column."""
    if key.startswith("ood "):
        return float(metrics["ood"][key.removeprefix("ood ")]["entropy"]["auroc"])
    return float(metrics[key])


def best_of(values: list[float | None], better: str) -> set[int]:
    """Places of the best value; several where they are equal, none where there is nothing to choose."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(values) < 2 or not known or min(known) == max(known):
        return set()
    best = max(known) if better == "high" else min(known)
    return {place for place, value in enumerate(values) if value == best}


def further_intervals(prediction: Prediction, outside: Mapping[str, ClassPrediction]) -> dict[str, list[float]]:
    """95 % intervals that `measure` leaves out: of the CRPS, and of detection by entropy."""
    if isinstance(prediction, RegressionPrediction):
        found = bootstrap(_crps(prediction))
        return {"crps": [found.low, found.high]}
    assert isinstance(prediction, ClassPrediction)
    intervals = {}
    for name, other in outside.items():
        found = _resampled(_auroc, *_scores(other.total, prediction.total))
        intervals[f"ood {name}"] = [found.low, found.high]
    return intervals


def difference(key: str, ours: Any, theirs: Any, outside: tuple[Any, Any] | None = None) -> Interval:
    """A metric of `ours` minus that of `theirs` on the same inputs, with interval and, for means, a p-value.

    `outside` are both predictions on the foreign inputs that an "ood" key is about.
    """
    if key.startswith("ood "):
        assert outside is not None
        inner, outer = (torch.stack([a.total, b.total], -1) for a, b in ((ours, theirs), outside))
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
    """Whether a difference is more than the choice of test inputs explains: at 5 %, by interval and by p-value."""
    crosses = found.low <= 0 <= found.high
    if crosses or not math.isfinite(found.value) or (found.p_value is not None and found.p_value >= 0.05):
        return "unclear"
    return "better" if (found.value > 0) == (better == "high") else "worse"


def _resampled(metric: Callable[[Tensor, Tensor], float], values: Tensor, labels: Tensor) -> Interval:
    return bootstrap_metric(metric, values, labels, resamples=RESAMPLES)


def _scores(outside: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of both groups in one tensor, and which are of foreign inputs."""
    foreign = torch.cat([torch.ones(len(outside)), torch.zeros(len(inside))]).bool()
    return torch.cat([outside, inside]), foreign


def _auroc(scores: Tensor, foreign: Tensor) -> float:
    if foreign.all() or not foreign.any():
        return math.nan
    return auroc(scores[foreign], scores[~foreign])


def _squares(prediction: Any) -> Tensor:
    squares: Tensor = (prediction.mean - prediction.targets).double().square()
    return squares.reshape(len(squares), -1).mean(-1)


def _root_difference(squares: Tensor) -> float:
    ours, theirs = squares.mean(0).sqrt().tolist()
    return float(ours - theirs)


def _crps(prediction: Any) -> Tensor:
    return crps_gaussian_each(prediction.mean, prediction.total, prediction.targets)


_EACH: dict[str, Callable[[Any], Tensor]] = {
    "accuracy": lambda p: correct(p.probs, p.targets).double(),
    "nll": lambda p: -p.log_likelihood.double(),
    "brier": lambda p: brier_each(p.probs, p.targets).double(),
    "crps": _crps,
}
