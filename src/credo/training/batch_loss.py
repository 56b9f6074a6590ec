"""The loss of a batch, and the examples it is a mean over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from credo.core.example_counts import EVERY, Counted
from credo.core.likelihood import Likelihood
from credo.core.posterior import Posterior

BatchNll = Callable[[nn.Module, Any], Tensor]
BatchCounts = Callable[[Any], Counted]


def likelihood_nll(posterior: Posterior) -> BatchNll:
    """Return the mean NLL of (inputs, targets) under the posterior's likelihood, as a function of network and batch."""

    def nll(net: nn.Module, batch: Any) -> Tensor:
        if not _is_pair(batch):
            raise TypeError("A batch must be (inputs, targets); for other batches give nll=lambda net, batch: …")
        x, y = (entry.to(posterior.device) for entry in batch)
        own = next((part.likelihood for part in posterior.parts if part.owns(net)), posterior.likelihood)
        return own.nll(net(x), y)

    return nll


def start_likelihoods_(posterior: Posterior, batch: Any) -> None:
    """Let a learned noise that the user did not give start from the spread of the first batch's targets.

    Args:
        posterior: Before its first step.
        batch: Inputs and targets.
    """
    if _is_pair(batch) and isinstance(batch[1], Tensor):
        group = posterior.process_group
        for part in posterior.all_posteriors():
            part.likelihood.start_(batch[1].to(posterior.device), None if group is None else group.average_)


def batch_counts(
    posterior: Posterior,
    nll: BatchNll | None,
    examples: Callable[[Any], float] | None,
    weights: Callable[[Any], Tensor] | None,
) -> BatchCounts | None:
    """Return what a batch's loss is a mean over, as a function of the batch; None if over all rows.

    Args:
        posterior: Its likelihood counts, unless one of the following is given.
        nll: The caller's own loss.
        examples: Number of examples that the mean was divided by.
        weights: How often each row counts.
    """
    if examples is not None or weights is not None:
        return lambda batch: Counted(
            None if examples is None else examples(batch), None if weights is None else weights(batch)
        )
    likelihood = posterior.likelihood
    if nll is not None or type(likelihood).counted is Likelihood.counted:
        return None
    return lambda batch: likelihood.counted(batch[1]) if _is_pair(batch) else EVERY


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2
