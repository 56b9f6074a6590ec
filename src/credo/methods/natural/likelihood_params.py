"""The likelihood's own parameters (a learned noise) beside natural-gradient updates: few, so Adam moves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from credo.core.likelihood import Likelihood
from credo.core.optimizer_step import OptimizerStep as Descent

_LR = 1e-2


def likelihood_descent(likelihood: Likelihood) -> Descent | None:
    """Adam on the likelihood's own parameters, if it has any."""
    own = {f"likelihood.{name}": p for name, p in likelihood.named_parameters() if p.requires_grad}
    return Descent(own, "adam", _LR) if own else None


def likelihood_gradients(descent: Descent | None) -> list[Tensor | None]:
    """Copies of the gradients gathered so far for the likelihood's own parameters."""
    own = descent.parameters.values() if descent else ()
    return [None if p.grad is None else p.grad.clone() for p in own]


def put_back_(descent: Descent | None, gradients: Sequence[Tensor | None]) -> None:
    """Gradients of the likelihood's own parameters as they were before a pass that does not count."""
    for parameter, gradient in zip(descent.parameters.values() if descent else (), gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


@contextmanager
def likelihood_kept_on_error(descent: Descent | None, *, first: bool, share: float = 1.0) -> Iterator[None]:
    """Around a pass: the first of an update begins without gradients, and one that fails leaves none behind.

    `share` is what the pass's gradients are multiplied by beside those of the first.
    """
    if descent is not None and first:
        descent.clear()
    before = likelihood_gradients(descent)
    try:
        yield
    except BaseException:
        put_back_(descent, before)
        raise
    if share != 1 and descent is not None:
        for parameter, old in zip(descent.parameters.values(), before, strict=True):
            if parameter.grad is not None:
                added = parameter.grad if old is None else parameter.grad - old
                parameter.grad = added * share + (0.0 if old is None else old)


def ready_likelihood(descent: Descent | None, count: float, *, at: int) -> None:
    """Average and check the gradients of the likelihood's own parameters, sums over passes whose shares are `count`."""
    grads = [p.grad for p in descent.parameters.values() if p.grad is not None] if descent else []
    if descent is not None and grads:
        torch._foreach_div_(grads, count)
        descent.ready(at=at)


def move_likelihood(descent: Descent | None, *, scale: float) -> None:
    """Update the likelihood's own parameters from gradients that are ready."""
    if descent is not None and any(p.grad is not None for p in descent.parameters.values()):
        descent.move(scale=scale)
