"""Selective prediction: accuracy on the most certain examples, risk-coverage curves.

Examples with equal uncertainty count with the mean over all orders among them. Saturated probabilities tie
often, and a curve that follows the order of the data set there would reward a file that happens to be sorted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.core.held_out.conformal_inputs import as_tensor, both_classes
from credo.core.support.binomial import beta_quantile, binomial_cdf
from credo.core.support.validate import checked_count, is_number
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


def augrc(probs: Tensor, labels: Tensor, uncertainty: Tensor) -> float:
    """Area under the generalised risk-coverage curve (Traub et al. 2024): smaller is better, at most ½.

    The generalised risk of a coverage is the fraction of *all* examples that are accepted and wrong. The area, by
    trapezoids from coverage 0, is the mean rate of undetected errors, and equals
    (1 − AUROC)·accuracy·(1 − accuracy) + ½·(1 − accuracy)²: unlike in `aurc`, the few most certain examples do not
    weigh more than others.

    Args:
        probs: Class probabilities [batch, classes].
        labels: Class indices [batch].
        uncertainty: Score of each example [batch]; larger is less certain.
    """
    errors = _ordered_errors(probs, labels, uncertainty)
    risk = errors.cumsum(0) / len(errors)
    return float(risk.mean() - 0.5 * risk[-1] / len(errors))


@dataclass(frozen=True)
class RiskControl:
    """A threshold on the uncertainty under which answers are wrong at most a stated part of the time.

    Attributes:
        threshold: Answers with a smaller uncertainty are accepted; −inf if no threshold could be shown to suffice.
        max_error: The error rate of accepted answers that is not exceeded.
        confidence: Probability, over the choice of the rows, that this is so; for new rows like them, not under shift.
        accepted: Fraction of the rows that are accepted.
        error: Error rate of the accepted rows; nan if there are none.
        bound: Upper Clopper-Pearson limit of the error rate, corrected for the number of thresholds tried.
        rows: Number of rows it was chosen on.
    """

    threshold: float
    max_error: float
    confidence: float
    accepted: float
    error: float
    bound: float
    rows: int

    def accepts(self, uncertainty: Tensor) -> Tensor:
        """Which answers are accepted, bool [n].

        Args:
            uncertainty: Of new examples [n], the score that the threshold was chosen for.
        """
        return as_tensor(uncertainty).double() < self.threshold


def risk_control(
    probs: Tensor,
    labels: Tensor,
    uncertainty: Tensor,
    *,
    max_error: float = 0.05,
    confidence: float = 0.95,
    thresholds: int = 20,
) -> RiskControl:
    """The largest threshold whose accepted answers are wrong at most `max_error` of the time, with `confidence`.

    Finite-sample: `thresholds` evenly spaced order statistics of the uncertainty are tried, the last one accepts all;
    each is tested by the exact binomial limit of Clopper and Pearson at level (1 − confidence)/thresholds (Bonferroni).
    Given the value of an order statistic, the rows below it are independent, so the limit is valid although the
    thresholds are from the same rows. Rows that have chosen nothing else are needed. Arrays of numpy are as good.

    Args:
        probs: Class probabilities [batch, classes]; [batch] of a yes for yes/no.
        labels: Class indices [batch].
        uncertainty: Score of each example [batch]; larger is less certain.
        max_error: Largest error rate of accepted answers.
        confidence: Probability that it is kept.
        thresholds: How many thresholds are tried.
    """
    for name, value in (("max_error", max_error), ("confidence", confidence)):
        if not is_number(value) or not 0 < value < 1:
            raise ValueError(f"{name}={value!r:.40} must lie between 0 and 1.")
    tried = checked_count("thresholds", thresholds)
    errors = (~correct(both_classes(as_tensor(probs)), as_tensor(labels))).cpu().double()
    ordered, order = check_scores(as_tensor(uncertainty), name="uncertainty", size=len(errors)).double().sort()
    wrong, rows = torch.nn.functional.pad(errors[order].cumsum(0), (1, 0)), len(errors)
    for step in range(tried, 0, -1):
        end = math.inf if step == tried else float(ordered[rows * step // tried])
        below = rows if step == tried else int(torch.searchsorted(ordered, end))
        found = int(wrong[below])
        if below and binomial_cdf(found, below, max_error) <= (1 - confidence) / tried:
            bound = beta_quantile(1 - (1 - confidence) / tried, found + 1, below - found)
            return RiskControl(end, max_error, confidence, below / rows, found / below, bound, rows)
    return RiskControl(-math.inf, max_error, confidence, 0.0, math.nan, math.nan, rows)


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
