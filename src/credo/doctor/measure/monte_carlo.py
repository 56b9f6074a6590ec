"""How much of a number is luck of the draws: Monte-Carlo error, and how many draws would be enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.doctor.measure.predictive import ClassForecast, Forecast, ValueForecast
from credo.doctor.thresholds import DRAWS_MOST, DRAWS_NLL_FLOOR, DRAWS_NLL_SHARE, DRAWS_PROBABILITY, DRAWS_VALUE

_RESAMPLES = 100


@dataclass(frozen=True)
class MonteCarlo:
    """Errors that another set of as many draws would show, the same networks for all examples.

    `probability_error` is the mean standard error of the class probability known worst (regression: of the predictive
    mean, as a share of the predictive standard deviation), `nll_error` and `metric_error` standard errors of the
    ensemble's NLL and metric. `nll_bias` is how much lower the NLL would be with endlessly many draws.
    """

    draws: int
    probability_error: float
    nll_error: float
    nll_bias: float
    metric_error: float
    wanted_draws: int


def monte_carlo(forecast: Forecast, *, random: bool, seed: int = 0) -> MonteCarlo | None:
    """Errors at the forecast's number of draws; None where nothing is random, or with one draw of each part."""
    if not random or forecast.draws < 2 * forecast.strata:
        return None
    bias, error = nll_errors(forecast.log_likelihood, forecast.strata)
    if isinstance(forecast, ClassForecast):
        spread = (within_variance(forecast.probs.double(), forecast.strata) / forecast.draws).sqrt().amax(-1)
        metric = accuracy_error(forecast, seed)
    else:
        assert isinstance(forecast, ValueForecast)
        variance = within_variance(forecast.mean, forecast.strata) / forecast.draws
        spread = variance.sqrt() / forecast.total
        metric = rmse_error(forecast)
    probability = float(spread.mean())
    return MonteCarlo(
        draws=forecast.draws,
        probability_error=probability,
        nll_error=error,
        nll_bias=bias,
        metric_error=metric,
        wanted_draws=_wanted(forecast, probability, bias, error),
    )


def within_variance(values: Tensor, strata: int) -> Tensor:
    """Variance over draws [draws, ...] of the same part, averaged over the parts they come from in turn."""
    usable = len(values) // strata * strata
    by_part: Tensor = values[:usable].unflatten(0, (-1, strata))
    return by_part.var(0).mean(0)


def nll_errors(log_likelihood: Tensor, strata: int) -> tuple[float, float]:
    """Bias and standard error of the mixture's NLL over sets of draws, to first order in 1/draws.

    With r = p_s/p̄ on each example: log p̄ is low by Var(r)/2 per draw (Jensen), and scatters by the mean of r over
    examples, which all share the draw.
    """
    draws = len(log_likelihood)
    pooled = log_likelihood.logsumexp(0) - math.log(draws)
    relative = (log_likelihood - pooled).exp()
    bias = within_variance(relative, strata).mean() / (2 * draws)
    error = (within_variance(relative.mean(1), strata) / draws).sqrt()
    return float(bias), float(error)


def rmse_error(forecast: ValueForecast) -> float:
    """Standard error of the ensemble's RMSE, to first order."""
    residual = forecast.mean.mean(0) - forecast.targets
    slope = (2 * residual * (forecast.mean - forecast.mean.mean(0))).reshape(forecast.draws, -1).mean(1)
    error = float((within_variance(slope, forecast.strata) / forecast.draws).sqrt())
    return error / (2 * forecast.metric) if forecast.metric > 0 else 0.0


def accuracy_error(forecast: ClassForecast, seed: int = 0) -> float:
    """Standard error of the ensemble's accuracy, by resampling draws within their parts."""
    generator = torch.Generator().manual_seed(seed)
    rounds = forecast.draws // forecast.strata
    probs = forecast.probs[: rounds * forecast.strata]
    found = []
    for _ in range(_RESAMPLES):
        # Draw i belongs to part i % strata.
        chosen = torch.randint(rounds, (rounds, forecast.strata), generator=generator) * forecast.strata
        index = (chosen + torch.arange(forecast.strata)).flatten()
        weights = index.bincount(minlength=len(probs)).to(probs.dtype)
        pooled = torch.tensordot(weights, probs, dims=1)
        found.append(float((pooled.argmax(-1) == forecast.labels).double().mean()))
    return float(torch.tensor(found, dtype=torch.float64).std())


def _wanted(forecast: Forecast, probability: float, bias: float, error: float) -> int:
    """Draws at which every error is below its limit: squares of standard errors and the bias fall with 1/draws."""
    tolerated = max(DRAWS_NLL_SHARE * abs(forecast.nll), DRAWS_NLL_FLOOR)
    allowed = DRAWS_PROBABILITY if isinstance(forecast, ClassForecast) else DRAWS_VALUE
    factor = max((probability / allowed) ** 2, bias / tolerated, (error / tolerated) ** 2)
    wanted = max(1, math.ceil(forecast.draws * factor))
    return min(DRAWS_MOST, 1 << (wanted - 1).bit_length())
