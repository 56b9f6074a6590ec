"""Accuracy (or RMSE) and NLL of the mean network, of single draws, of their ensemble, and of a plain twin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.doctor.measure.predictive import ClassForecast, Forecast, ValueForecast
from credo.evaluate.intervals import Interval, paired_difference


@dataclass(frozen=True)
class Score:
    """One predictor's metric (accuracy or RMSE) and NLL."""

    metric: float
    nll: float


@dataclass(frozen=True)
class Gap:
    """How much worse one predictor is than another on the same examples, each with a 95 % interval.

    `error` is the difference of error rates (or of mean squared errors): positive is worse, as for `nll`.
    """

    nll: Interval
    error: Interval


@dataclass(frozen=True)
class Scores:
    """All predictors on the examples to judge by; `train` is the ensemble on training examples.

    `draw` is the average of single draws, `lowest` and `highest` the metric's range over them. `chance` is the best
    constant forecast on training targets, and `learned` the share of its error that the ensemble takes away there:
    1 is perfect, 0 is chance; where the data are noisy nobody comes near 1. `chance_over_train` is how much worse than
    the ensemble the constant is on the same examples, `chance_over_judged` on those to judge by, if these are others.
    `reach` is the RMSE on training data over the root mean square of the targets, None for classes. `mean` is None for
    a mixture, which has no mean network.
    """

    metric: str
    mean: Score | None
    draw: Score
    lowest: float
    highest: float
    ensemble: Score
    twin: Score | None
    train: Score
    chance: Score
    learned: float
    ensemble_over_mean: Gap | None
    ensemble_over_twin: Gap | None
    mean_over_twin: Gap | None
    chance_over_train: Gap
    chance_over_judged: Gap | None = None
    reach: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Numbers by name; each score under the metric's own name."""
        result: dict[str, Any] = {"metric": self.metric}
        for name in ("mean", "draw", "ensemble", "twin", "train", "chance"):
            score: Score | None = getattr(self, name)
            result[name] = None if score is None else {self.metric: score.metric, "nll": score.nll}
        result["draw"] |= {f"lowest_{self.metric}": self.lowest, f"highest_{self.metric}": self.highest}
        result |= {"learned": self.learned, "reach": self.reach}
        for name in (
            "ensemble_over_mean",
            "ensemble_over_twin",
            "mean_over_twin",
            "chance_over_train",
            "chance_over_judged",
        ):
            gap: Gap | None = getattr(self, name)
            result[name] = None if gap is None else {"nll": bounds(gap.nll), "error": bounds(gap.error)}
        return result


def bounds(interval: Interval) -> dict[str, float]:
    """An interval as plain numbers."""
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def scores(
    draws: Forecast,
    *,
    mean: Forecast | None,
    twin: Forecast | None,
    train: Forecast,
    train_targets: Tensor,
    held_out: bool = True,
) -> Scores:
    """The table that says where quality is lost: in the mean network, by the noise, or nowhere.

    `held_out` says whether `draws` is on other examples than `train`.
    """
    constant = constant_forecast(train, train_targets)
    chance = score(constant)
    metric_of_draws = draws.metric_of_draws
    return Scores(
        metric=draws.metric_name,
        mean=None if mean is None else score(mean),
        draw=Score(float(metric_of_draws.mean()), float(draws.nll_of_draws.mean())),
        lowest=float(metric_of_draws.min()),
        highest=float(metric_of_draws.max()),
        ensemble=score(draws),
        twin=None if twin is None else score(twin),
        train=score(train),
        chance=chance,
        learned=learned_share(train.metric_name, train.metric, chance.metric),
        ensemble_over_mean=None if mean is None else gap(draws, mean),
        ensemble_over_twin=None if twin is None else gap(draws, twin),
        mean_over_twin=None if mean is None or twin is None else gap(mean, twin),
        chance_over_train=gap(constant, train),
        reach=_reach(train),
        chance_over_judged=gap(constant_forecast(train, train_targets, draws), draws) if held_out else None,
    )


def score(forecast: Forecast) -> Score:
    """Metric and NLL of the mixture of all draws."""
    return Score(forecast.metric, forecast.nll)


def gap(first: Forecast, second: Forecast) -> Gap:
    """How much worse the first is than the second, example by example."""
    nll = paired_difference(-first.pooled_log_likelihood, -second.pooled_log_likelihood)
    sign = -1 if first.metric_name == "accuracy" else 1
    return Gap(nll, paired_difference(sign * first.metric_each, sign * second.metric_each))


def learned_share(metric: str, value: float, chance: float) -> float:
    """The share of a constant forecast's error that is gone: of its error rate, or of its mean squared error."""
    if metric == "accuracy":
        return (value - chance) / (1 - chance) if chance < 1 else 1.0
    return 1 - (value / chance) ** 2 if chance > 0 else 1.0


def _reach(train: Forecast) -> float | None:
    if not isinstance(train, ValueForecast):
        return None
    return train.metric / max(float(train.targets.square().mean().sqrt()), 1e-300)


def constant_forecast(train: Forecast, targets: Tensor, judged: Forecast | None = None) -> Forecast:
    """The best constant forecast of these training targets, as a forecast of one network; or on other examples.

    There every class counts once more than it was seen: one that was not must not cost everything.
    """
    if isinstance(train, ClassForecast):
        labels = judged.labels if isinstance(judged, ClassForecast) else train.labels
        counts = train.labels.bincount(minlength=train.probs.shape[-1]).double() + (judged is not None)
        shares = counts / counts.sum()
        return ClassForecast(shares.log()[labels].unsqueeze(0), 1, shares.expand(1, len(labels), -1), labels)
    known = targets.double().cpu()
    y = judged.targets if isinstance(judged, ValueForecast) else known
    mean, std = known.mean(0), known.var(0, correction=0).clamp_min(1e-300).sqrt()
    density = torch.distributions.Normal(mean, std, validate_args=False).log_prob(y)
    rows = density.reshape(1, len(y), -1).sum(-1)
    return ValueForecast(rows, 1, mean.expand(1, *y.shape), std.expand(1, *y.shape), y)
