"""How near the predictions of a posterior are to those of another, such as long chains of HMC."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from credo.core.network.inputs import AnyInputs
from credo.core.posterior import Posterior
from credo.core.support.keywords import checked_keywords
from credo.core.support.validate import checked_count, checked_seed
from credo.evaluate.fidelity.function_draws import FunctionDraws, function_draws

# Groups of draws that are left out in turn for the Monte-Carlo error.
_GROUPS = 8
# Spreads below this fraction of the reference's largest do not enter ratios.
_NO_SPREAD = 1e-6


class Measured(NamedTuple):
    """A number with its Monte-Carlo error.

    Attributes:
        value: The number itself.
        error: Its standard error over other sets of as many draws, by the jackknife.
        floor: The same number between two halves of the reference's own draws: what cannot be told from zero (of
            `top1` and `std_ratio`, from 1).
    """

    value: float
    error: float
    floor: float


class Agreement(NamedTuple):
    """Differences between two posteriors' predictions, averaged over inputs.

    Attributes:
        top1: Fraction of inputs with the same most probable class; None of other targets.
        tv: Total variation ½Σ|p − p_ref| of the averaged class probabilities; None of other targets.
        mean: |mean − mean_ref| over draws of each probability, or of the mean (of `Quantiles`: the quantiles) that a
            network predicts of other targets.
        std: |std − std_ref| of the same over draws: the epistemic part of the uncertainty.
        std_ratio: Geometric mean of std / std_ref; below 1 the posterior is too sure. NaN for a point estimate.
        w1: Wasserstein-1 distance of the distributions over draws of the same.
    """

    top1: Measured | None
    tv: Measured | None
    mean: Measured
    std: Measured
    std_ratio: Measured
    w1: Measured


@checked_keywords()
def agreement(
    posterior: Posterior, reference: Posterior, x: AnyInputs, *, draws: int = 400, seed: int = 0
) -> Agreement:
    """Compare the predictions of two posteriors on given inputs: on the data, between them, or far from them.

    Args:
        posterior: Any posterior; if it is calibrated, its calibrated predictions are compared.
        reference: What it is compared with, of the same task.
        x: Inputs.
        draws: Networks of each posterior; all inputs have the same ones. One network for a point estimate.
        seed: Seed of the draws.
    """
    draws, seed = checked_count("draws", draws, least=2 * _GROUPS), checked_seed(seed)
    if posterior.likelihood.task != reference.likelihood.task:
        raise ValueError(f"posterior does {posterior.likelihood.task}, reference {reference.likelihood.task}.")
    ours = function_draws(posterior, x, draws=draws, seed=seed)
    theirs = function_draws(reference, x, draws=draws, seed=seed + 1)
    if ours.values.shape[1:] != theirs.values.shape[1:]:
        shapes = f"{list(ours.values.shape[1:])} and {list(theirs.values.shape[1:])}"
        raise ValueError(f"The predictions have different shapes, {shapes}: the networks have different outputs.")
    return compared(ours, theirs, are_random=(posterior.is_random, reference.is_random))


def compared(ours: FunctionDraws, theirs: FunctionDraws, *, are_random: tuple[bool, bool] = (True, True)) -> Agreement:
    """Differences between predictions that are drawn already.

    Args:
        ours: Predictions of the posterior.
        theirs: Predictions of the reference.
        are_random: Which of the two vary with the draws.
    """
    a, b = ours.values, theirs.values

    def measured(metric: Callable[[Tensor, Tensor], float]) -> Measured:
        half = len(b) // 2
        floor = metric(b[:half], b[half:]) if are_random[1] and half > 1 else metric(b, b)
        return Measured(metric(a, b), _jackknife(metric, a, b, are_random), floor)

    return Agreement(
        top1=measured(top1_agreement) if ours.is_class else None,
        tv=measured(total_variation) if ours.is_class else None,
        mean=measured(lambda p, q: float((p.mean(0) - q.mean(0)).abs().mean())),
        std=measured(lambda p, q: float((spread(p) - spread(q)).abs().mean())),
        std_ratio=measured(spread_ratio),
        w1=measured(wasserstein),
    )


def top1_agreement(p: Tensor, q: Tensor) -> float:
    """Fraction of inputs for which averages over draws have the same most probable class.

    Args:
        p: Probabilities [draws, batch, classes].
        q: Those of the reference, with any number of draws.
    """
    return float((p.mean(0).argmax(-1) == q.mean(0).argmax(-1)).double().mean())


def total_variation(p: Tensor, q: Tensor) -> float:
    """½Σ|p − q| of the averages over draws, averaged over inputs.

    Args:
        p: Probabilities [draws, batch, classes].
        q: Those of the reference, with any number of draws.
    """
    return float(0.5 * (p.mean(0) - q.mean(0)).abs().sum(-1).mean())


def spread(values: Tensor) -> Tensor:
    """Standard deviation over draws [draws, ...]; zero for one of them.

    Args:
        values: Values of functions.
    """
    return values.std(0) if len(values) > 1 else torch.zeros_like(values[0])


def spread_ratio(p: Tensor, q: Tensor) -> float:
    """Geometric mean of the ratios of standard deviations over draws; NaN if the first are zero.

    Args:
        p: Values [draws, batch, outputs].
        q: Those of the reference, with any number of draws.
    """
    ours, theirs = spread(p), spread(q)
    counts = theirs > _NO_SPREAD * theirs.max()
    if not bool(counts.any()) or not bool((ours[counts] > 0).any()):
        return float("nan")
    return float((ours[counts].clamp(min=_NO_SPREAD * float(theirs.max())) / theirs[counts]).log().mean().exp())


def wasserstein(p: Tensor, q: Tensor) -> float:
    """Wasserstein-1 distance ∫|F − G| of the values' distributions over draws, averaged over inputs and outputs.

    Args:
        p: Values [draws, batch, outputs].
        q: Those of the reference, with any number of draws.
    """
    size = max(len(p), len(q))
    levels = (torch.arange(size, dtype=torch.double) + 0.5) / size
    quantiles = [values.sort(0).values[(levels * len(values)).long()] for values in (p, q)]
    return float((quantiles[0] - quantiles[1]).abs().mean())


def _jackknife(metric: Callable[[Tensor, Tensor], float], a: Tensor, b: Tensor, are_random: tuple[bool, bool]) -> float:
    """Standard error over the draws of both, by leaving out groups of them in turn."""
    variance = 0.0
    for index, is_random in enumerate(are_random):
        if not is_random:
            continue
        varied = (a, b)[index]
        groups = torch.arange(len(varied)) * _GROUPS // len(varied)
        found = []
        for group in range(_GROUPS):
            left = varied[groups != group]
            found.append(metric(left, b) if index == 0 else metric(a, left))
        variance += float(torch.tensor(found, dtype=torch.double).var()) * (_GROUPS - 1) ** 2 / _GROUPS
    return math.sqrt(variance)
