"""Does the forecast promise more, or less, than it keeps? Over- and under-dispersion with intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.doctor.measure.predictive import ClassForecast, Forecast, ValueForecast
from credo.doctor.measure.scores import bounds
from credo.evaluate.intervals import Interval, bootstrap, bootstrap_metric
from credo.evaluate.regression import interval_coverage


@dataclass(frozen=True)
class Dispersion:
    """What classification and regression have in common.

    `surprise` is 1 for a calibrated forecast, above 1 if it is too sure of itself, below if it is not sure enough, with
    a 95 % interval: NLL / entropy of p̄ (the NLL that the forecast itself expects), or the mean squared z-score.
    `excess` is NLL − entropy in nats, None for regression. `epistemic_share` is the draws' part of the uncertainty:
    mutual information / entropy, or a share of the variance; 0 if all draws agree.
    """

    surprise: Interval
    excess: Interval | None
    epistemic_share: float
    details: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        excess = None if self.excess is None else bounds(self.excess)
        return {
            "surprise": bounds(self.surprise),
            "excess": excess,
            "epistemic_share": self.epistemic_share,
            **self.details,
        }


def dispersion(forecast: Forecast) -> Dispersion:
    """Promise against outcome, on the examples of the forecast."""
    if isinstance(forecast, ClassForecast):
        return _classes(forecast)
    assert isinstance(forecast, ValueForecast)
    return _values(forecast)


def _classes(forecast: ClassForecast) -> Dispersion:
    pooled = forecast.pooled.double()
    pooled = pooled / pooled.sum(-1, keepdim=True)
    expected, of_draws = entropy(pooled), entropy(forecast.probs.double()).mean(0)
    actual = -forecast.pooled_log_likelihood
    confidence = pooled.amax(-1)
    total = float(expected.mean())
    return Dispersion(
        surprise=ratio(actual, expected),
        excess=bootstrap(actual - expected),
        epistemic_share=max(0.0, 1 - float(of_draws.mean()) / total) if total > 0 else 0.0,
        details={
            "confidence": float(confidence.mean()),
            "accuracy": forecast.metric,
            "overconfidence": bounds(bootstrap(confidence - forecast.metric_each)),
            "entropy": total,
            "classes": pooled.shape[-1],
            "nll": float(actual.mean()),
        },
    )


def _values(forecast: ValueForecast) -> Dispersion:
    mean, total, noise = forecast.mean.mean(0), forecast.total, forecast.noise
    z_squared = ((forecast.targets - mean) / total).square()
    share = 1 - noise.square().mean() / total.square().mean()
    return Dispersion(
        surprise=bootstrap(z_squared.reshape(len(z_squared), -1).mean(1)),
        excess=None,
        epistemic_share=max(0.0, float(share)),
        details={
            "mean_z_squared": float(z_squared.mean()),
            "coverage": {f"{k:g}": v for k, v in interval_coverage(mean, total, forecast.targets).items()},
            "aleatoric": float(noise.square().mean().sqrt()),
            "epistemic": float((total.square() - noise.square()).clamp_min(0).mean().sqrt()),
            "rmse": forecast.metric,
        },
    )


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
