"""Monte-Carlo error of predictions and scores, and the number of draws that would be enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.doctor.measure.predictive import ClassPredictive, Predictive, RegressionPredictive
from credo.doctor.thresholds import DRAWS_MOST, DRAWS_NLL_FLOOR, DRAWS_NLL_FRACTION, DRAWS_PROBABILITY, DRAWS_VALUE

_RESAMPLES = 100


@dataclass(frozen=True)
class MonteCarlo:
    """Variation over other sets of as many draws, with the same networks for all examples.

    `probability_error` is the standard error of the least certain class probability, averaged over examples
    (regression: of the predictive mean over the predictive standard deviation), `nll_error` and `metric_error` those of
    the ensemble, `nll_bias` how much lower its NLL would be with infinitely many draws. `wanted_draws` are enough.
    """

    draws: int
    probability_error: float
    nll_error: float
    nll_bias: float
    metric_error: float
    wanted_draws: int


def monte_carlo(predictive: Predictive, *, random: bool, seed: int = 0) -> MonteCarlo | None:
    """Monte-Carlo errors of `predictive`; None if it is not `random`, or has one draw per part.

    The error of the accuracy is by resampling with this `seed`.
    """
    if not random or predictive.draws < 2 * predictive.strata:
        return None
    bias, error = nll_errors(predictive.log_likelihood, predictive.strata)
    if isinstance(predictive, ClassPredictive):
        spread = (within_variance(predictive.probs.double(), predictive.strata) / predictive.draws).sqrt().amax(-1)
        metric = accuracy_error(predictive, seed)
    else:
        assert isinstance(predictive, RegressionPredictive)
        variance = within_variance(predictive.mean, predictive.strata) / predictive.draws
        spread = variance.sqrt() / predictive.total
        metric = rmse_error(predictive)
    probability = float(spread.mean())
    return MonteCarlo(
        draws=predictive.draws,
        probability_error=probability,
        nll_error=error,
        nll_bias=bias,
        metric_error=metric,
        wanted_draws=_wanted(predictive, probability, bias, error),
    )


def within_variance(values: Tensor, strata: int) -> Tensor:
    """Variance over the draws of one part, averaged over the parts; `values` [draws, ...] cycle through the parts."""
    usable = len(values) // strata * strata
    by_part: Tensor = values[:usable].unflatten(0, (-1, strata))
    return by_part.var(0).mean(0)


def nll_errors(log_likelihood: Tensor, strata: int) -> tuple[float, float]:
    """Bias and standard error of the mixture's NLL over sets of draws, to first order in 1/draws.

    With r = p_s/p̄ on each example: log p̄ is low by Var(r)/2 per draw (Jensen), and varies with the mean of r over
    the examples, which all share the draw.
    """
    draws = len(log_likelihood)
    pooled = log_likelihood.logsumexp(0) - math.log(draws)
    relative = (log_likelihood - pooled).exp()
    bias = within_variance(relative, strata).mean() / (2 * draws)
    error = (within_variance(relative.mean(1), strata) / draws).sqrt()
    return float(bias), float(error)


def rmse_error(predictive: RegressionPredictive) -> float:
    """Standard error of the ensemble's RMSE, to first order."""
    residual = predictive.mean.mean(0) - predictive.targets
    gradient = (2 * residual * (predictive.mean - predictive.mean.mean(0))).reshape(predictive.draws, -1).mean(1)
    error = float((within_variance(gradient, predictive.strata) / predictive.draws).sqrt())
    return error / (2 * predictive.metric) if predictive.metric > 0 else 0.0


def accuracy_error(predictive: ClassPredictive, seed: int = 0) -> float:
    """Standard error of the ensemble's accuracy, by resampling draws within their parts."""
    generator = torch.Generator().manual_seed(seed)
    rounds = predictive.draws // predictive.strata
    probs = predictive.probs[: rounds * predictive.strata]
    found = []
    for _ in range(_RESAMPLES):
        # Draw i belongs to part i % strata.
        chosen = torch.randint(rounds, (rounds, predictive.strata), generator=generator) * predictive.strata
        index = (chosen + torch.arange(predictive.strata)).flatten()
        weights = index.bincount(minlength=len(probs)).to(probs.dtype)
        pooled = torch.tensordot(weights, probs, dims=1)
        found.append(float((pooled.argmax(-1) == predictive.labels).double().mean()))
    return float(torch.tensor(found, dtype=torch.float64).std())


def _wanted(predictive: Predictive, probability: float, bias: float, error: float) -> int:
    """Draws at which every error is tolerable: the bias and squared standard errors fall with 1/draws."""
    tolerated = max(DRAWS_NLL_FRACTION * abs(predictive.nll), DRAWS_NLL_FLOOR)
    allowed = DRAWS_PROBABILITY if isinstance(predictive, ClassPredictive) else DRAWS_VALUE
    factor = max((probability / allowed) ** 2, bias / tolerated, (error / tolerated) ** 2)
    wanted = max(1, math.ceil(predictive.draws * factor))
    return min(DRAWS_MOST, 1 << (wanted - 1).bit_length())
