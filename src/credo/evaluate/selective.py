"""Selective prediction: accuracy on the most certain examples, risk-coverage curves.

Examples with equal uncertainty count with the mean over all orders among them. Saturated probabilities tie
often, and a curve that follows the order of the data set there would reward a file that happens to be sorted.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from credo.evaluate.checks import check_scores
from credo.evaluate.classification import correct


def retained_accuracy(
    probs: Tensor,
    labels: Tensor,
    uncertainty: Tensor,
    fractions: Sequence[float] = (0.2, 0.4, 0.6, 0.8, 1.0),
) -> dict[float, float]:
    """Accuracy on the most certain fraction of the examples, for each fraction.

    Args:
        probs: Class probabilities [batch, classes].
        labels: Class indices [batch].
        uncertainty: Score of each example [batch]; larger is less certain.
        fractions: Of the examples; rounded to the nearest number of examples (a half upwards), at least one.
    """
    for fraction in fractions:
        if not 0 < fraction <= 1:
            raise ValueError(f"fractions contain {fraction}; pass numbers above 0 and at most 1")
    errors = _ordered_errors(probs, labels, uncertainty)
    # The tiny term: 0.29 · 50 is 14.499999999999998 in floating point.
    kept = {fraction: max(1, math.floor(fraction * len(errors) + 0.5 + 1e-9)) for fraction in fractions}
    return {fraction: 1 - float(errors[:count].mean()) for fraction, count in kept.items()}


def risk_coverage(probs: Tensor, labels: Tensor, uncertainty: Tensor) -> tuple[Tensor, Tensor]:
    """Coverages 1/n, 2/n, …, 1 and the error rate of that fraction of most certain examples, float64 [n].

    Args:
        probs: Class probabilities [batch, classes].
        labels: Class indices [batch].
        uncertainty: Score of each example [batch]; larger is less certain.
    """
    return _curve(_ordered_errors(probs, labels, uncertainty))


def aurc(probs: Tensor, labels: Tensor, uncertainty: Tensor) -> float:
    """Area under the risk-coverage curve, the mean of the risks at all n coverages: smaller is better.

    Mixes accuracy with ranking: a more accurate model has the smaller area even with useless uncertainties.

    Args:
        probs: Class probabilities [batch, classes].
        labels: Class indices [batch].
        uncertainty: Score of each example [batch]; larger is less certain.
    """
    _, risk = risk_coverage(probs, labels, uncertainty)
    return float(risk.mean())


def excess_aurc(probs: Tensor, labels: Tensor, uncertainty: Tensor) -> float:
    """The area minus that of the best ranking, all right predictions first (Geifman et al. 2019).

    Zero for a perfect ranking. The optimum is computed exactly, not by the logarithmic approximation of the
    paper.

    Args:
        probs: Class probabilities [batch, classes].
        labels: Class indices [batch].
        uncertainty: Score of each example [batch]; larger is less certain.
    """
    errors = _ordered_errors(probs, labels, uncertainty)
    _, risk = _curve(errors)
    _, best = _curve((~correct(probs, labels)).cpu().double().sort().values)
    return float((risk - best).mean())


def _ordered_errors(probs: Tensor, labels: Tensor, uncertainty: Tensor) -> Tensor:
    """Errors (0 or 1; the group's mean among ties) from the most to the least certain example, in float64."""
    errors = (~correct(probs, labels)).cpu().double()
    uncertainty = check_scores(uncertainty, name="uncertainty", size=len(errors))
    ordered, order = uncertainty.sort()
    size: Tensor = torch.unique_consecutive(ordered, return_counts=True)[1]
    group = torch.arange(len(size)).repeat_interleave(size)
    return (torch.bincount(group, weights=errors[order]) / size)[group]


def _curve(errors: Tensor) -> tuple[Tensor, Tensor]:
    kept = torch.arange(1, len(errors) + 1, dtype=errors.dtype)
    return kept / len(errors), errors.cumsum(0) / kept
