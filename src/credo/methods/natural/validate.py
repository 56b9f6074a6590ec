"""What natural-gradient methods refuse: numbers that cannot be meant, and what is not finite."""

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
    """Refuse a rising temperature that cannot be meant."""
    checked_count("warmup_steps", steps, least=0, what="steps")
    if start is not None and not 0 < start < math.inf:
        raise ValueError(f"temperature_start={start} must be positive and finite.")
    if (start is None) != (steps == 0):
        raise ValueError(
            f"temperature_start={start} and warmup_steps={steps} belong together: give both (and at least one step) or "
            "neither."
        )


def check_paper_tau(temperature: float, decay: float) -> None:
    """Refuse a weight of the old curvature, 1 − temperature·(1 − decay), that is negative."""
    if temperature * (1 - decay) > 1:
        raise ValueError(
            "paper_tau=True decays the curvature by 1 − temperature·(1 − curvature_decay), which is negative at "
            f"temperature {temperature} with curvature_decay={decay}: take a curvature_decay of at least "
            f"{1 - 1 / temperature:.4g}, or paper_tau=False."
        )


def check_augmentation(factor: float) -> None:
    """Refuse a factor of the data's size that cannot be meant."""
    if not 0 < factor < math.inf:
        raise ValueError(f"augmentation={factor} must be positive and finite.")


def check_numbers(*, momentum: float, decay: float, damping: float, draws: int, temperature: float) -> None:
    """Refuse hyper-parameters that cannot be meant."""
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


def check_finite(squares: float, gathered: Sequence[Mapping[str, Tensor]], at: int) -> None:
    """Refuse gathered gradients or curvatures that are not finite, by name."""
    if math.isfinite(squares):
        return
    for what, tensors in zip(("gradient", "curvature"), gathered, strict=False):
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"The {what} of {name} is not finite at step {at}; {_ADVICE}")
    raise NonFiniteError(f"Gradients or curvatures are too large to stay finite at step {at}; {_ADVICE}")


def check_loss(value: float, posterior: Posterior) -> None:
    """Refuse a loss that is NaN or infinite, in a process group when all know of it."""
    if posterior.process_group is not None and posterior.process_group.defers:
        posterior.process_group.doubt(value)
    else:
        refuse_loss(value, posterior)


def refuse_loss(value: float, posterior: Posterior) -> None:
    """An error if a loss is NaN or infinite; within a pass the parameters are the draw's."""
    if not math.isfinite(value):
        bad = (plain_name(name) for name, p in posterior.named_parameters() if not is_finite(p.detach()))
        remedy = "a smaller lr or more damping"
        raise NonFiniteError(loss_message(value, posterior.steps, next(bad, None), remedy))
