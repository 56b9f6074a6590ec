"""The loss of a batch, and the examples it is a mean over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.example_counts import EVERY, Counted
from credo.core.likelihood import Likelihood
from credo.core.likelihood.end_of_network import warn_of_last_function
from credo.core.likelihood.target_scale import warn_of_target_scale
from credo.core.network.inputs import AnyInputs, run_network
from credo.core.posterior import Posterior

BatchNll = Callable[[nn.Module, Any], Tensor]
BatchCounts = Callable[[Any], Counted]
ReadBatch = Callable[[Any], tuple[AnyInputs, Tensor | None]]


def likelihood_nll(posterior: Posterior, read: ReadBatch, weights: Callable[[Any], Tensor] | None = None) -> BatchNll:
    """Return the mean NLL of a batch under the posterior's likelihood, as a function of network and batch.

    Args:
        posterior: The posterior.
        read: Gives the inputs and targets of a batch.
        weights: How often each row counts: the mean is Σ wᵢ·ℓᵢ / Σ wᵢ. None: once.
    """

    unchecked = posterior.steps == 0

    def nll(net: nn.Module, batch: Any) -> Tensor:
        nonlocal unchecked
        x, y = read(batch)
        if y is None:
            raise TypeError(
                "A batch without targets cannot be trained on: give batches (inputs, targets) or mappings with "
                "`labels`, or target=lambda batch: …; for other losses nll=lambda net, batch: … Two tensors (x, y) are "
                "two batches of inputs; one batch of both is [(x, y)]."
            )
        if not y.numel():
            raise ValueError("An empty batch cannot be trained on: leave it out of the loader.")
        own = next((part.likelihood for part in posterior.parts if part.owns(net)), posterior.likelihood)
        device = posterior.device
        outputs, y = run_network(net, x.to(device)), y.to(device)
        if unchecked and torch.is_grad_enabled():
            unchecked = False
            warn_of_last_function(own, net, outputs)
            warn_of_target_scale(own, outputs, y)
        if outputs.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(device.type):
            outputs = outputs.float()  # the loss of a pass in lower precision is taken in single precision
        if weights is None:
            return own.nll(outputs, y)
        each, weight = own.nll_each(outputs, y), weights(batch)
        if weight.shape != each.shape:
            raise ValueError(f"weights gave shape {list(weight.shape)} for a batch of {len(each)} rows.")
        weight = weight.to(each)
        return (weight * each).sum() / weight.sum()

    return nll


def start_likelihoods_(posterior: Posterior, y: Tensor | None) -> None:
    """Let a learned noise that the user did not give start from the spread of the first batch's targets.

    Args:
        posterior: Before its first step.
        y: Targets of the first batch.
    """
    if y is not None:
        group = posterior.process_group
        for part in posterior.all_posteriors():
            part.likelihood.start_(y.to(posterior.device), None if group is None else group.average_)


def batch_counts(
    posterior: Posterior,
    nll: BatchNll | None,
    examples: Callable[[Any], float] | None,
    weights: Callable[[Any], Tensor] | None,
    read: ReadBatch,
) -> BatchCounts | None:
    """Return what a batch's loss is a mean over, as a function of the batch; None if over all rows.

    Args:
        posterior: Its likelihood counts, unless one of the following is given.
        nll: The caller's own loss.
        examples: Number of examples that the mean was divided by.
        weights: How often each row counts.
        read: Gives the inputs and targets of a batch.
    """
    if examples is not None or weights is not None:
        return lambda batch: Counted(
            None if examples is None else examples(batch), None if weights is None else weights(batch)
        )
    likelihood = posterior.likelihood
    if nll is not None or type(likelihood).counted is Likelihood.counted:
        return None

    def counts(batch: Any) -> Counted:
        y = read(batch)[1]
        return EVERY if y is None else likelihood.counted(y)

    return counts
