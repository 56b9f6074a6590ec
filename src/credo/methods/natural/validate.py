"""Validation of natural-gradient methods: hyper-parameters, losses, and what was gathered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from credo.core.errors import NonFiniteError
from credo.core.optimizer_step import is_finite, loss_message, plain_name
from credo.core.posterior import Posterior
from credo.core.support.validate import is_number

_ADVICE = "parameters are still those before it. Try a smaller lr, more damping, or look at the inputs of this batch."


def check_damping(damping: float) -> None:
    """Raise ValueError unless the damping is a number, finite and not negative."""
    if not is_number(damping):
        raise ValueError(f"damping={damping!r:.80} must be one number.")
    if not 0 <= damping < math.inf:
        raise ValueError(f"damping={damping} must not be negative.")


def check_clip(clip: float | None) -> None:
    """Raise ValueError unless the bound on a step is None or a positive number."""
    if clip is not None and not (is_number(clip) and clip > 0):
        raise ValueError(f"clip={clip!r:.80} must be a positive number, or None for no clipping.")


def check_finite(total: float, gathered: Sequence[Mapping[str, Tensor]], at: int) -> None:
    """Raise NonFiniteError if what was gathered is not finite, with the parameter's name.

    Args:
        total: A sum over all of it, which is not finite then.
        gathered: Gradients and curvatures by parameter name.
        at: The step.
    """
    if math.isfinite(total):
        return
    for what, tensors in zip(("gradient", "curvature"), gathered, strict=False):
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"The {what} of {name} is not finite at step {at}; {_ADVICE}")
    raise NonFiniteError(f"Gradients or curvatures are too large to stay finite at step {at}; {_ADVICE}")


def check_loss(value: float, posterior: Posterior) -> None:
    """Raise NonFiniteError for a NaN or infinite loss; in a process group, once all processes know of it."""
    if posterior.process_group is not None and posterior.process_group.defers:
        posterior.process_group.record_nonfinite(value)
    else:
        check_finite_loss(value, posterior)


def check_finite_loss(value: float, posterior: Posterior) -> None:
    """Raise NonFiniteError for a NaN or infinite loss, with a parameter that is not finite, if any.

    Within a pass the parameters are the draw's.
    """
    if not math.isfinite(value):
        bad = (plain_name(name) for name, p in posterior.named_parameters() if not is_finite(p.detach()))
        remedy = "a smaller lr or more damping"
        raise NonFiniteError(loss_message(value, posterior.steps, next(bad, None), remedy))
