"""Over- and underconfidence of predictions, with intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.doctor.measure.predictive import ClassPredictive, Predictive, RegressionPredictive
from credo.doctor.measure.scores import bounds
from credo.evaluate.intervals import Interval, bootstrap, bootstrap_metric
from credo.evaluate.regression import interval_coverage
from credo.predict.kinds.target_distribution import NormalMixture

# Levels of the intervals whose coverage is shown.
_LEVELS = (0.5, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Dispersion:
    """Observed against expected errors.

    Attributes:
        surprise: Observed over expected NLL (the entropy of p̄), or the mean squared z-score, with a 95 % interval: 1 if
            calibrated, above 1 if overconfident, below 1 if underconfident.
        excess: NLL − entropy in nats; None for regression.
        epistemic_fraction: Part of the uncertainty that comes from the draws: mutual information / entropy, or a
            fraction of the variance; 0 if all draws agree.
        details: Further numbers by name, different for classification and regression.
    """

    surprise: Interval
    excess: Interval | None
    epistemic_fraction: float
    details: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        excess = None if self.excess is None else bounds(self.excess)
        return {
            "surprise": bounds(self.surprise),
            "excess": excess,
            "epistemic_fraction": self.epistemic_fraction,
            **self.details,
        }


def dispersion(predictive: Predictive) -> Dispersion:
    """Compare observed with expected errors on the examples of `predictive`."""
    if isinstance(predictive, ClassPredictive):
        return _classes(predictive)
    assert isinstance(predictive, RegressionPredictive)
    return _values(predictive)


def _classes(predictive: ClassPredictive) -> Dispersion:
    pooled = predictive.pooled.double()
    pooled = pooled / pooled.sum(-1, keepdim=True)
    expected, of_draws = entropy(pooled), entropy(predictive.probs.double()).mean(0)
    actual, by_example = -predictive.pooled_log_likelihood, predictive.by_example
    confidence = pooled.amax(-1)
    total = float(expected.mean())
    return Dispersion(
        surprise=ratio(by_example(actual), by_example(expected)),
        excess=bootstrap(by_example(actual - expected)),
        epistemic_fraction=max(0.0, 1 - float(of_draws.mean()) / total) if total > 0 else 0.0,
        details={
            "confidence": float(confidence.mean()),
            "accuracy": predictive.metric,
            "overconfidence": bounds(bootstrap(by_example(confidence - predictive.metric_each))),
            "entropy": total,
            "classes": pooled.shape[-1],
            "nll": float(actual.mean()),
        },
    )


def _values(predictive: RegressionPredictive) -> Dispersion:
    mean, total, noise = predictive.mean.mean(0), predictive.total, predictive.noise
    z_squared = ((predictive.targets - mean) / total).square()
    fraction = 1 - noise.square().mean() / total.square().mean()
    return Dispersion(
        surprise=bootstrap(z_squared.reshape(len(z_squared), -1).mean(1)),
        excess=None,
        epistemic_fraction=max(0.0, float(fraction)),
        details={
            "mean_z_squared": float(z_squared.mean()),
            "coverage": {f"{level:g}": part for level, part in _coverage(predictive).items()},
            "aleatoric": float(noise.square().mean().sqrt()),
            "epistemic": float((total.square() - noise.square()).clamp_min(0).mean().sqrt()),
            "rmse": predictive.metric,
        },
    )


def _coverage(predictive: RegressionPredictive) -> dict[float, float]:
    """Fraction of targets inside the central intervals of the mixture; of counts inside those of a normal."""
    mean, targets = predictive.mean.mean(0), predictive.targets
    if predictive.likelihood is not None:
        return interval_coverage(mean, predictive.total, targets, _LEVELS)
    offsets, stds = (predictive.mean - mean).transpose(0, 1), predictive.std.transpose(0, 1)
    off_centre = (2 * NormalMixture(mean, offsets, stds).cdf(targets) - 1).abs()
    return {level: float((off_centre <= level).double().mean()) for level in _LEVELS}


def entropy(probs: Tensor) -> Tensor:
    """−Σ p log p over the last dimension."""
    each: Tensor = torch.special.entr(probs)
    return each.sum(-1)


def ratio(top: Tensor, bottom: Tensor) -> Interval:
    """Ratio of two means over the same examples, with a 95 % bootstrap interval."""

    def of_means(a: Tensor, b: Tensor) -> float:
        below = float(b.mean())
        return float(a.mean()) / below if below > 0 else float("inf")

    return bootstrap_metric(of_means, top, bottom)
