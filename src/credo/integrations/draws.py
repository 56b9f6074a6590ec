"""Averages over draws of what a loop computes with the network in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from credo.core.likelihood import Categorical
from credo.core.posterior import Posterior
from credo.optim import PosteriorOptimizer

Result = TypeVar("Result")


def posterior_optimizer(optimizer: object) -> PosteriorOptimizer:
    """The optimiser inside a loop's wrapper. Raises TypeError if it is none of `credo.optim`."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, PosteriorOptimizer):
        raise TypeError(f"The optimiser is {type(inner).__name__}: give one of credo.optim, such as credo.optim.IVON.")
    return inner


def with_draws(posterior: Posterior, run: Callable[[], Result], *, draws: int, seed: int) -> list[Result]:
    """What `run` returns with each draw in the network; the same draws for every batch, none of them training's.

    Args:
        posterior: Of the network that `run` uses.
        run: A pass of the network.
        draws: Number of draws.
        seed: Seed of the draws.
    """
    found = []
    with torch.no_grad(), posterior.guard.exclusive(posterior), posterior.seeded(seed):
        for draw in posterior.iter_draws(posterior.whole_draws(draws)):
            with posterior.sampled_in_place(draw):
                found.append(run())
    return found


def averaged(posterior: Posterior, outputs: list[Tensor]) -> Tensor:
    """Log-probabilities of the averaged probabilities of classes, which are logits too; else the averaged outputs.

    Args:
        posterior: Its likelihood says what the outputs mean.
        outputs: The network's outputs for each draw, classes last.
    """
    together = torch.stack(outputs)
    if not isinstance(posterior.likelihood, Categorical):
        return together.mean(0)
    return together.log_softmax(-1).logsumexp(0) - torch.tensor(float(len(outputs))).log().item()
