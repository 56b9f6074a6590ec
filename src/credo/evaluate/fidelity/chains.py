"""Convergence of Markov chains: split-R̂ and effective sample sizes of any quantity, by rank-normalised values.

Definitions of Vehtari, Gelman, Simpson, Carpenter & Bürkner (2021). Values are [chains, draws] or
[chains, draws, quantities]; each chain is cut into halves, so that one that drifts disagrees with itself. In networks
these should be quantities of functions, predictions or log-likelihoods: weights can be permuted without consequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

LEAST_DRAWS = 4

Diagnostic = Callable[[Tensor], Tensor]


def _of_halves(diagnostic: Diagnostic) -> Diagnostic:
    """Give a function of [2·chains, draws/2, quantities] values [chains, draws] or [chains, draws, quantities]."""

    @wraps(diagnostic)
    def checked(values: Tensor) -> Tensor:
        if values.dim() not in (2, 3) or values.shape[1] < LEAST_DRAWS:
            raise ValueError(
                f"Values of shape {list(values.shape)}: they must be [chains, draws] or [chains, draws, quantities], "
                f"with {LEAST_DRAWS} draws or more."
            )
        each = values.detach().double().reshape(*values.shape[:2], -1)
        half = each.shape[1] // 2
        found = diagnostic(torch.cat([each[:, :half], each[:, -half:]]))
        is_usable = each.isfinite().all(0).all(0) & (each != each[0, 0]).any(0).any(0)
        found = torch.where(is_usable, found, math.nan)
        return found[0] if values.dim() == 2 else found

    return checked


@_of_halves
def split_rhat(values: Tensor) -> Tensor:
    """Rank-normalised split-R̂ of each quantity: the larger one of values and of their distances from the median.

    1 where chains agree; above 1.01 they do not, yet. NaN where all values are equal, or some are not finite.

    Args:
        values: Draws of each chain, 4 or more.
    """
    folded = (values - torch.quantile(values.flatten(0, 1), 0.5, dim=0)).abs()
    return torch.maximum(_rhat(rank_normalised(values)), _rhat(rank_normalised(folded)))


def rhat_noise(chains: int, draws: int, quantities: int, alarms: float = 0.01) -> float:
    """The largest split-R̂ of several quantities that independent draws exceed with a given probability, or less.

    Means of halves with the same distribution have the variance of one draw over n times F, which has 2·chains − 1 and
    2·chains·(n − 1) degrees of freedom, n = draws/2; its quantile is that of Paulson (1942). Infinite where draws are
    too few to tell.

    Args:
        chains: Number of chains.
        draws: Draws of each.
        quantities: Number of quantities, of each of which values and distances from the median are looked at.
        alarms: The probability, divided among the quantities.
    """
    count, length = 2 * chains, draws // 2
    z = float(torch.special.ndtri(torch.tensor(1 - alarms / (2 * quantities), dtype=torch.double)))
    a, b = 2 / (9 * (count - 1)), 2 / (9 * count * (length - 1)) if length > 1 else math.inf
    below = (1 - b) ** 2 - b * z**2
    if not (b < 1 and below > 0):
        return math.inf
    root = (1 - a) * (1 - b) + z * math.sqrt(max(a * (1 - b) ** 2 + b * (1 - a) ** 2 - a * b * z**2, 0.0))
    return math.sqrt((length - 1 + (root / below) ** 3) / length)


@_of_halves
def ess_bulk(values: Tensor) -> Tensor:
    """Effective sample size for the middle of the distribution of each quantity; NaN as in `split_rhat`.

    Args:
        values: Draws of each chain, 4 or more.
    """
    return _ess(rank_normalised(values))


@_of_halves
def ess_tail(values: Tensor) -> Tensor:
    """The smaller one of the effective sample sizes of the 5 % and 95 % quantiles; NaN as in `split_rhat`.

    Args:
        values: Draws of each chain, 4 or more.
    """
    flat = values.flatten(0, 1)
    low, high = (_ess((values <= torch.quantile(flat, level, dim=0)).double()) for level in (0.05, 0.95))
    return torch.minimum(low, high)


@_of_halves
def ess_mean(values: Tensor) -> Tensor:
    """Effective sample size for the mean of the values themselves, not of their ranks; NaN as in `split_rhat`.

    Args:
        values: Draws of each chain, 4 or more.
    """
    return _ess(values)


def rank_normalised(values: Tensor) -> Tensor:
    """Φ⁻¹((r − ⅜)/(S + ¼)), r the average rank of a value among all S of its quantity.

    Args:
        values: [chains, draws, quantities].
    """
    columns = values.flatten(0, 1).T.contiguous()
    ordered = columns.sort(1).values
    below = torch.searchsorted(ordered, columns)
    ranks = 0.5 * (below + torch.searchsorted(ordered, columns, right=True) + 1).double()
    normalised: Tensor = torch.special.ndtri((ranks - 0.375) / (columns.shape[1] + 0.25))
    return normalised.T.reshape(values.shape)


def _rhat(values: Tensor) -> Tensor:
    draws = values.shape[1]
    within = values.var(1).mean(0)
    between = values.mean(1).var(0)
    return (((draws - 1) / draws * within + between) / within).sqrt()


def _ess(values: Tensor) -> Tensor:
    """chains·draws/τ; τ sums autocorrelations until a pair of them is negative (Geyer 1992)."""
    chains, draws, _ = values.shape
    covariances = _autocovariances(values).mean(0)
    within = covariances[0] * draws / (draws - 1)
    total = covariances[0] + (values.mean(1).var(0) if chains > 1 else 0.0)
    rho = 1 - (within - covariances) / total
    rho[0] = 1.0
    pairs = rho[: draws // 2 * 2].unflatten(0, (-1, 2)).sum(1)
    is_positive = (pairs > 0).cumprod(0).bool()
    summed = torch.where(is_positive, pairs.cummin(0).values, 0.0).sum(0)
    # The first even one after them, if positive: reduces the bias where odd ones are negative.
    last = is_positive.sum(0).clamp(max=len(pairs) - 1)
    next_even = rho[:-1:2].gather(0, last.unsqueeze(0))[0].clamp(min=0.0)
    tau = -1 + 2 * summed + torch.where(is_positive.all(0), 0.0, next_even)
    size = chains * draws
    return size / tau.clamp(min=1 / math.log10(size))


def _autocovariances(values: Tensor) -> Tensor:
    """Of each chain at all lags, [chains, lags, quantities], divided by the number of draws."""
    draws = values.shape[1]
    centred = values - values.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, n=2 * draws, dim=1)
    summed: Tensor = torch.fft.irfft(spectrum.abs().square(), n=2 * draws, dim=1)[:, :draws]
    return summed / draws
