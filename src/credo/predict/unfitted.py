"""Warn where predictions have no uncertainty of the weights because the posterior lacks a pass, or samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from credo.core.errors import PredictiveWarning
from credo.core.posterior import Posterior
from credo.core.support.user_warnings import warn

_IS_TRAINING = ContextVar("is_training", default=False)


@contextmanager
def while_training() -> Iterator[None]:
    """While open, in this thread, nothing is warned of: what a method finds after training is not there yet."""
    token = _IS_TRAINING.set(True)
    try:
        yield
    finally:
        _IS_TRAINING.reset(token)


def warn_if_unfitted(posterior: Posterior) -> None:
    """Warn if a method that has draws would predict with the network at the mean alone.

    Args:
        posterior: What predicts.
    """
    if _IS_TRAINING.get():
        return
    for part in (posterior, *posterior.parts):
        if part.uncertainty_needs:
            warn(
                f"This {type(part).__name__} predicts with the network as it is, without any uncertainty of its "
                f"weights. It needs {part.uncertainty_needs}. For a point estimate use credo.MAP.",
                PredictiveWarning,
            )
            return
