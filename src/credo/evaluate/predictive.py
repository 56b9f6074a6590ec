"""Scores of a regression's predictive distribution: normal, the likelihood's own, or recalibrated."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from credo.evaluate.regression import crps_gaussian_each, interval_coverage
from credo.predict import DistributionPrediction, RegressionPrediction


def coverage_of(
    prediction: RegressionPrediction, levels: Sequence[float] = (0.5, 0.8, 0.9, 0.95)
) -> dict[float, float]:
    """Fraction of targets inside the central interval of each level.

    Args:
        prediction: With targets.
        levels: Probabilities of the intervals.
    """
    assert prediction.targets is not None
    if isinstance(prediction, DistributionPrediction):
        values = prediction.likelihoods[0].values(prediction.targets)
        found = {}
        for level in levels:
            low, high = prediction.interval(level)
            found[level] = float(((low <= values) & (values <= high)).double().mean())
        return found
    if prediction.residuals is None:
        return interval_coverage(prediction.mean, prediction.total, prediction.targets, levels)
    off_centre = (2 * prediction.cdf(prediction.targets) - 1).abs()
    return {level: float((off_centre <= level).double().mean()) for level in levels}


def crps_of(prediction: RegressionPrediction) -> Tensor:
    """The continuous ranked probability score of each row, the mean over its outputs.

    Args:
        prediction: With targets.
    """
    assert prediction.targets is not None
    if isinstance(prediction, DistributionPrediction):
        return prediction.crps()
    made, rows = prediction.residuals, len(prediction)
    if made is None:
        return crps_gaussian_each(prediction.mean, prediction.total, prediction.targets)
    total = prediction.total.double().reshape(rows, -1) / made.std
    residuals = (prediction.targets - prediction.mean).double().reshape(rows, -1) / total + made.mean
    return (total * made.crps(residuals)).mean(1)
