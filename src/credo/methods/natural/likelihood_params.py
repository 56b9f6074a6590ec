"""The likelihood's own parameters (a learned noise) beside natural-gradient updates: few, so Adam moves them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from credo.core.likelihood import Likelihood
from credo.core.optimizer_step import OptimizerStep

_LR = 1e-2


def likelihood_optimizer(likelihood: Likelihood) -> OptimizerStep | None:
    """Adam on the likelihood's own parameters, if it has any."""
    own = {f"likelihood.{name}": p for name, p in likelihood.named_parameters() if p.requires_grad}
    return OptimizerStep(own, "adam", _LR) if own else None


@contextmanager
def likelihood_restored_on_error(optimizer: OptimizerStep, *, first: bool, size: float = 1.0) -> Iterator[None]:
    """Around a pass: one that fails leaves no gradients behind.

    Args:
        optimizer: Steps on the likelihood's parameters.
        first: Whether this is the first pass of an update, which begins without gradients.
        size: Factor of the pass's gradients.
    """
    if first:
        optimizer.clear()
    parameters = optimizer.parameters.values()
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    try:
        yield
    except BaseException:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        raise
    if size != 1:
        for parameter, old in zip(parameters, before, strict=True):
            if parameter.grad is not None:
                added = parameter.grad if old is None else parameter.grad - old
                parameter.grad = added * size + (0.0 if old is None else old)


def ready_likelihood(optimizer: OptimizerStep, size: float, *, at: int) -> None:
    """Average and check the gradients of the likelihood's own parameters.

    Args:
        optimizer: Steps on them.
        size: What their sums over passes are divided by.
        at: The step, for error messages.
    """
    grads = [p.grad for p in optimizer.parameters.values() if p.grad is not None]
    if grads:
        torch._foreach_div_(grads, size)
        optimizer.ready(at=at)


def move_likelihood(optimizer: OptimizerStep, *, scale: float) -> None:
    """Update the likelihood's own parameters from gradients that are ready."""
    if any(p.grad is not None for p in optimizer.parameters.values()):
        optimizer.move(scale=scale)
