"""Validation of natural-gradient methods: hyper-parameters, losses, and what was gathered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from credo.core.errors import NonFiniteError
from credo.core.optimizer_step import is_finite, loss_message, plain_name
from credo.core.posterior import Posterior
from credo.core.support.validate import checked_count, is_number

_ADVICE = "parameters are still those before it. Try a smaller lr, more damping, or look at the inputs of this batch."


def check_warmup(start: float | None, steps: int) -> None:
    """Raise ValueError for an impossible warm-up of the temperature."""
    checked_count("warmup_steps", steps, least=0, what="steps")
    if start is not None and not 0 < start < math.inf:
        raise ValueError(f"temperature_start={start} must be positive and finite.")
    if (start is None) != (steps == 0):
        raise ValueError(
            f"temperature_start={start} and warmup_steps={steps} belong together: give both (and at least one step) or "
            "neither."
        )


def check_augmentation(factor: float) -> None:
    """Raise ValueError for an impossible factor of the data's size."""
    if not 0 < factor < math.inf:
        raise ValueError(f"augmentation={factor} must be positive and finite.")


def check_numbers(*, momentum: float, decay: float, damping: float, draws: int, temperature: float) -> None:
    """Raise ValueError for impossible hyper-parameters.

    Args:
        momentum: The argument of that name.
        decay: The argument `curvature_decay`.
        damping: The argument of that name.
        draws: The argument of that name.
        temperature: The argument of that name.
    """
    for name, value in {
        "momentum": momentum,
        "curvature_decay": decay,
        "damping": damping,
        "temperature": temperature,
    }.items():
        if not is_number(value):
            raise ValueError(f"{name}={value!r:.80} must be one number.")
    for name, value in (("momentum", momentum), ("curvature_decay", decay)):
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must lie in [0, 1).")
    if not 0 <= damping < math.inf:
        raise ValueError(f"damping={damping} must not be negative.")
    checked_count("draws", draws, what="draws a step")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be positive and finite; 1 is the exact posterior.")


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
        posterior.process_group.doubt(value)
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
