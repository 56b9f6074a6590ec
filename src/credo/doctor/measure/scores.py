"""Accuracy (or RMSE) and NLL of the mean network, of single draws, of their ensemble, and of a baseline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.core.likelihood import DistributionLikelihood
from credo.doctor.measure.predictive import (
    ClassPredictive,
    Predictive,
    RegressionPredictive,
    distribution_predictive,
)
from credo.evaluate.intervals import Interval, paired_difference


@dataclass(frozen=True)
class Score:
    """One predictor's metric (accuracy or RMSE) and NLL."""

    metric: float
    nll: float


@dataclass(frozen=True)
class Gap:
    """How much worse one predictor is than another on the same examples, with 95 % intervals.

    `error` is the difference of error rates or mean squared errors; positive is worse, as for `nll`.
    """

    nll: Interval
    error: Interval


@dataclass(frozen=True)
class Scores:
    """Scores of all predictors on the evaluated examples, and paired differences between them.

    Attributes:
        mean: The mean weights; None for a mixture or samples of chains, which have no mean network.
        draw: Average of single draws, whose metric is from `lowest` to `highest`.
        train: The ensemble of all draws, on training examples.
        chance: The best constant prediction of the training targets.
        learned: Fraction of its error that the ensemble removes there: 1 is perfect, 0 is chance; with noisy data no
            network reaches 1.
        ensemble_over_mean: How much worse the ensemble is than the mean weights; other `a_over_b` likewise.
        relative_rmse: RMSE on training data over the root mean square of the targets; None for classes.
    """

    metric: str
    mean: Score | None
    draw: Score
    lowest: float
    highest: float
    ensemble: Score
    baseline: Score | None
    train: Score
    chance: Score
    learned: float
    ensemble_over_mean: Gap | None
    ensemble_over_baseline: Gap | None
    mean_over_baseline: Gap | None
    chance_over_train: Gap
    chance_over_held_out: Gap | None = None
    relative_rmse: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Numbers by name, scores under the name of the metric."""
        result: dict[str, Any] = {"metric": self.metric}
        for name in ("mean", "draw", "ensemble", "baseline", "train", "chance"):
            score: Score | None = getattr(self, name)
            result[name] = None if score is None else {self.metric: score.metric, "nll": score.nll}
        result["draw"] |= {f"lowest_{self.metric}": self.lowest, f"highest_{self.metric}": self.highest}
        result |= {"learned": self.learned, "relative_rmse": self.relative_rmse}
        for name in (
            "ensemble_over_mean",
            "ensemble_over_baseline",
            "mean_over_baseline",
            "chance_over_train",
            "chance_over_held_out",
        ):
            gap: Gap | None = getattr(self, name)
            result[name] = None if gap is None else {"nll": bounds(gap.nll), "error": bounds(gap.error)}
        return result


def bounds(interval: Interval) -> dict[str, float]:
    """An interval as plain numbers."""
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def scores(
    draws: Predictive,
    *,
    mean: Predictive | None,
    baseline: Predictive | None,
    train: Predictive,
    train_targets: Tensor,
    held_out: bool = True,
) -> Scores:
    """Score predictions of the `draws`, the `mean` weights and the `baseline`, and compare them.

    `train` are those of the draws on training examples, which have `train_targets`; the others are on the same
    examples unless `held_out`.
    """
    constant = constant_predictive(train, train_targets)
    chance = score(constant)
    metric_of_draws = draws.metric_of_draws
    return Scores(
        metric=draws.metric_name,
        mean=None if mean is None else score(mean),
        draw=Score(float(metric_of_draws.mean()), float(draws.nll_of_draws.mean())),
        lowest=float(metric_of_draws.min()),
        highest=float(metric_of_draws.max()),
        ensemble=score(draws),
        baseline=None if baseline is None else score(baseline),
        train=score(train),
        chance=chance,
        learned=learned_fraction(train.metric_name, train.metric, chance.metric),
        ensemble_over_mean=None if mean is None else gap(draws, mean),
        ensemble_over_baseline=None if baseline is None else gap(draws, baseline),
        mean_over_baseline=None if mean is None or baseline is None else gap(mean, baseline),
        chance_over_train=gap(constant, train),
        relative_rmse=_relative_rmse(train),
        chance_over_held_out=gap(constant_predictive(train, train_targets, draws), draws) if held_out else None,
    )


def score(predictive: Predictive) -> Score:
    """Metric and NLL of the mixture of all draws."""
    return Score(predictive.metric, predictive.nll)


def gap(first: Predictive, second: Predictive) -> Gap:
    """How much worse the first predictor is than the second, paired by example."""
    sign = -1 if first.metric_name == "accuracy" else 1
    losses, errors = (
        [one.by_example(each) for one, each in zip((first, second), pair, strict=True)]
        for pair in (
            (-first.pooled_log_likelihood, -second.pooled_log_likelihood),
            (sign * first.metric_each, sign * second.metric_each),
        )
    )
    return Gap(paired_difference(*losses), paired_difference(*errors))


def learned_fraction(metric: str, value: float, chance: float) -> float:
    """Fraction of a constant prediction's error rate or mean squared error that is removed.

    `value` is the network's `metric`, `chance` that of the constant.
    """
    if metric == "accuracy":
        return (value - chance) / (1 - chance) if chance < 1 else 1.0
    return 1 - (value / chance) ** 2 if chance > 0 else 1.0


def _relative_rmse(train: Predictive) -> float | None:
    if not isinstance(train, RegressionPredictive):
        return None
    return train.metric / max(float(train.targets.square().mean().sqrt()), 1e-300)


def constant_predictive(train: Predictive, targets: Tensor, other: Predictive | None = None) -> Predictive:
    """The best constant prediction of the training `targets`, as a predictive distribution of one draw.

    For the examples of `train`, or of `other`: class counts are then increased by one, so that a class without training
    examples does not get probability 0. Labels that may hold together have frequencies of their own.
    """
    if isinstance(train, ClassPredictive):
        to = other if isinstance(other, ClassPredictive) else train
        column, to_column = (torch.zeros_like(p.labels) if p.columns is None else p.columns for p in (train, to))
        classes, most = train.probs.shape[-1], int(torch.cat([column, to_column]).max()) + 1
        counts = (column * classes + train.labels).bincount(minlength=most * classes).view(most, classes).double()
        counts += other is not None
        probs = (counts / counts.sum(1, keepdim=True))[to_column]
        chosen = probs.log().gather(1, to.labels.unsqueeze(1)).squeeze(1)
        return ClassPredictive(chosen.unsqueeze(0), 1, probs.unsqueeze(0), to.labels, to.rows, to.columns)
    known = targets.double().cpu()
    y = other.targets if isinstance(other, RegressionPredictive) else known
    assert isinstance(train, RegressionPredictive)
    if train.likelihood is not None:
        constant = best_constant(train.likelihood, train.shape, known)
        return distribution_predictive([train.likelihood], constant.expand(1, len(y), *train.shape), y)
    mean, std = known.mean(0), known.var(0, correction=0).clamp_min(1e-300).sqrt()
    density = torch.distributions.Normal(mean, std, validate_args=False).log_prob(y)
    rows = density.reshape(1, len(y), -1).sum(-1)
    return RegressionPredictive(rows, 1, mean.expand(1, *y.shape), std.expand(1, *y.shape), y)


def best_constant(likelihood: DistributionLikelihood, shape: tuple[int, ...], targets: Tensor) -> Tensor:
    """The network's output with the lowest NLL on all targets, if it were the same for all inputs.

    Args:
        likelihood: Of the targets.
        shape: Of the output of one input.
        targets: [n, targets] in float64.
    """
    device = next((tensor.device for tensor in likelihood.parameters()), targets.device)
    start = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64, device=device)
    outputs, y = start.view(shape).requires_grad_(), targets.to(device)
    optimizer = torch.optim.LBFGS([outputs], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> float:
        with torch.enable_grad():
            loss = likelihood.nll_each(outputs.expand(len(y), *shape), y).mean()
        (outputs.grad,) = torch.autograd.grad(loss, outputs)
        return float(loss.detach())

    optimizer.step(closure)
    return outputs.detach()
