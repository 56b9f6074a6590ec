"""Whether chains agree about functions: R̂ and effective sample sizes of predictions and of the log-likelihood."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from credo.core.likelihood import ClassLikelihood
from credo.core.network.inputs import AnyInputs, run_network
from credo.core.network.substitute import Draw
from credo.core.posterior import Posterior
from credo.core.sampling import evaluating
from credo.core.support.keywords import checked_keywords
from credo.evaluate.fidelity.chains import LEAST_DRAWS, ess_bulk, ess_tail, rhat_noise, split_rhat

# Samples of all chains that are run: more are thinned evenly.
MOST_SAMPLES = 2000


class ChainStudy(NamedTuple):
    """Convergence of chains in function space.

    Attributes:
        chains: Number of chains.
        draws: Samples of each that were used.
        rhat: Largest split-R̂ of any prediction; up to 1.01 chains agree.
        rhat_noise: What that of as many independent samples is above in one study of a hundred: with few samples a
            larger R̂ than 1.01 means nothing.
        rhat_median: The median over predictions.
        rhat_within: Median over predictions and chains of the split-R̂ of one chain by itself: whether each has settled
            where it is.
        ess_bulk: Smallest effective sample size of any prediction, for its middle.
        ess_tail: Smallest one for its 5 % and 95 % quantiles.
        rhat_log_likelihood: Split-R̂ of the log-likelihood of the rows; NaN without targets.
        ess_log_likelihood: Its effective sample size for the middle.
    """

    chains: int
    draws: int
    rhat: float
    rhat_noise: float
    rhat_median: float
    rhat_within: float
    ess_bulk: float
    ess_tail: float
    rhat_log_likelihood: float
    ess_log_likelihood: float


@checked_keywords()
@torch.no_grad()
def chain_study(posterior: Posterior, x: AnyInputs, y: Tensor | None = None) -> ChainStudy | None:
    """Diagnostics of the chains that a posterior keeps samples of; None if it keeps none, or fewer than 4 of a chain.

    The members of an ensemble of samplers count as chains. One of `SGLD` or `SGHMC` is one chain, whose halves are
    compared.

    Args:
        posterior: Such as `HMC`, `SGHMC`, or an `Ensemble` of samplers.
        x: Inputs whose predictions are looked at, some tens or hundreds.
        y: Their targets, for the log-likelihood.
    """
    values, likelihoods = [], []
    with evaluating(posterior, 0) as frozen:
        described = [part.describe().chains for part in frozen.parts]
        found = [chains for chains in described if chains is not None]
        shortest = min((chains.length for chains in found), default=0)
        if len(found) < len(described) or shortest < LEAST_DRAWS:
            return None
        draws = min(shortest, max(LEAST_DRAWS, MOST_SAMPLES // sum(chains.count for chains in found)))
        for part, chains in zip(frozen.parts, found, strict=True):
            chosen = torch.linspace(0, chains.length - 1, draws).round().int().tolist()
            inputs, targets = x.to(part.device), None if y is None else y.to(part.device)
            for chain in range(chains.count):
                one, two = _of_chain(part, (chains.at(chain, index) for index in chosen), inputs, targets)
                values.append(one)
                likelihoods.append(two)
    return study(torch.stack(values), torch.stack(likelihoods))


def study(values: Tensor, log_likelihood: Tensor) -> ChainStudy:
    """Diagnostics of given predictions.

    Args:
        values: Predictions [chains, draws, quantities].
        log_likelihood: That of the rows, [chains, draws]; NaN if it is not known.
    """
    rhats = split_rhat(values)
    usable = values[..., rhats.isfinite()]
    rhats = rhats[rhats.isfinite()]
    within = torch.stack([split_rhat(chain.unsqueeze(0)).nanmedian() for chain in usable])
    if not len(rhats):  # no prediction varies
        rhats, usable = torch.full((1,), float("nan")), values[..., :1]
    return ChainStudy(
        chains=values.shape[0],
        draws=values.shape[1],
        rhat=float(rhats.max()),
        rhat_noise=rhat_noise(values.shape[0], values.shape[1], len(rhats)),
        rhat_median=float(rhats.median()),
        rhat_within=float(within.nanmedian()),
        ess_bulk=float(ess_bulk(usable).min()),
        ess_tail=float(ess_tail(usable).min()),
        rhat_log_likelihood=float(split_rhat(log_likelihood)),
        ess_log_likelihood=float(ess_bulk(log_likelihood)),
    )


def _of_chain(part: Posterior, chain: Iterable[Draw], x: AnyInputs, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """Predictions [draws, quantities] and log-likelihoods [draws] of the samples of one chain."""
    likelihood = part.likelihood
    values, found = [], []
    for draw in chain:
        with part.sampled_in_place(draw) as net:
            outputs = run_network(net, x)
        values.append(likelihood.log_probs(outputs).exp() if isinstance(likelihood, ClassLikelihood) else outputs)
        found.append(torch.nan if y is None else -float(likelihood.nll(outputs, y)))
    return torch.stack(values).flatten(1).double().cpu(), torch.tensor(found, dtype=torch.double)
