"""Conformal sets and intervals of a prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from credo.core.errors import PredictiveWarning
from credo.core.held_out.conformal import Conformal, ConformalIntervals, ConformalSets
from credo.core.held_out.risk_sets import RiskControlledSets
from credo.core.support.user_warnings import warn
from credo.predict.result import ClassPrediction, P, RegressionPrediction


def conformed(prediction: P, found: Conformal | None) -> P:
    """Add conformal sets or intervals, if there are any.

    Args:
        prediction: Of all rows.
        found: The posterior's `conformal`.
    """
    if found is None:
        return prediction
    changes: dict[str, Any]
    of_labels = isinstance(found, RiskControlledSets) and hasattr(prediction, "sets")
    if of_labels or (isinstance(found, ConformalSets) and isinstance(prediction, ClassPrediction)):
        assert not isinstance(found, ConformalIntervals)
        changes = {"sets": found.sets(prediction)}
    elif isinstance(found, ConformalIntervals) and isinstance(prediction, RegressionPrediction):
        ends = found.intervals(prediction)
        changes = dict(zip(("lower", "upper"), whole(*ends) if prediction.is_discrete else ends, strict=True))
    else:
        given = type(prediction).__name__
        raise TypeError(f"posterior.conformal has {type(found).__name__}, its predictions are {given}.")
    return replace(prediction, **changes)


def whole(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest count in each interval; of one without any, the count that is nearest to it.

    Args:
        lower: Lower ends.
        upper: Upper ends.
    """
    first, last = lower.ceil().clamp_min(0), upper.floor()
    nearest = (0.5 * (lower + upper)).round().clamp_min(0)
    return torch.where(first > last, nearest, first), torch.where(first > last, nearest, last)


def warn_of_other_predictions(
    found: Conformal | None, meant: Callable[[str | None, int], str | None], **way: Any
) -> None:
    """Warn if the conformal thresholds were chosen for predictions of another kind, whose coverage is not theirs.

    Args:
        found: The posterior's `conformal`.
        meant: Gives the link that is meant by one that may be None, with this number of outputs.
        way: As in `Conformal.differences`.
    """
    if found is None:
        return
    if way["predictive"] == found.predictive == "linear":
        outputs = found.classes if isinstance(found, ConformalSets) else found.outputs
        found, way = replace(found, link=meant(found.link, outputs)), {**way, "link": meant(way["link"], outputs)}
    other = found.differences(**way)
    if other:
        warn(
            f"Conformal sets and intervals were chosen for other predictions ({other}) and may cover less than they "
            "should: predict as credo.conformal did, or call it again with these arguments.",
            PredictiveWarning,
        )
