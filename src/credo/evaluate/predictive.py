"""Scores of a regression's predictive distribution: the mixture of draws, or what has taken its place."""

from __future__ import annotations

from collections.abc import Sequence

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
    off_centre = (2 * prediction.pit() - 1).abs()  # between the ends where they are between their levels
    return {level: float((off_centre <= level).double().mean()) for level in levels}
