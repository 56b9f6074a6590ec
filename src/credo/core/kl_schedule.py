"""Schedules for the weight of the KL; except for a warm-up, weights average one over an epoch.

The objective is mean NLL + (temperature·weight(step)/data_size)·KL. The mini-batch weights πᵢ of Blundell et al.
(2015), defined for a batch's *summed* NLL with Σᵢ πᵢ = 1, correspond to batches·πᵢ here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from credo.core.errors import unknown
from credo.core.support.validate import is_count

KLWeight = Callable[[int], float]


def constant(step: int) -> float:
    """1 at every step: the exact ELBO."""
    return 1.0


def uniform(batches: int) -> KLWeight:
    """πᵢ = 1/batches: the same as `constant`, under its name in the literature."""
    weight = 1 / batches
    return lambda step: batches * weight


def blundell(batches: int) -> KLWeight:
    """πᵢ = 2^(B−i)/(2^B−1), i = 1…B: half of the KL in the first batch of an epoch, 99.9 % in the first ten."""

    def weight(step: int) -> float:
        i = step % batches + 1
        # 2^(B−i)/(2^B−1) without the overflow of 2^B.
        return float(batches * 2.0**-i / (1 - 2.0**-batches))

    return weight


def warmup(steps: int) -> KLWeight:
    """Linear from 0 to 1 over the first `steps` steps, then 1 (Sønderby et al. 2016)."""
    return lambda step: min(1.0, step / steps)


def forgotten(step: int) -> float:
    """Weight of a loaded posterior whose schedule was a function, which files cannot store; raises at any step."""
    raise ValueError(
        "This posterior has no kl_weight to train with: it was a function, which a file cannot store. Pass it again: "
        "credo.load(path, kl_weight=...)."
    )


KL_WEIGHTS = ("constant", "uniform", "blundell", "warmup")


def make_kl_weight(choice: str | KLWeight | None, *, batches: int | None, warmup_steps: int | None) -> KLWeight:
    """Build a KL-weight schedule.

    Args:
        choice: One of `KL_WEIGHTS`, a function of the step, or None for an unknown schedule that raises when used.
        batches: Batches per epoch; required by `blundell` and `uniform`.
        warmup_steps: Steps of the linear warm-up; required by `warmup`.
    """
    if choice is None:
        return forgotten
    if callable(choice):
        return choice
    if choice not in KL_WEIGHTS:
        raise ValueError(unknown("kl_weight", choice, KL_WEIGHTS))
    if warmup_steps is not None and choice != "warmup":
        raise ValueError(
            f"warmup_steps={warmup_steps} has no effect with kl_weight={choice!r}: use kl_weight='warmup'."
        )
    if choice == "constant":
        return constant
    needed, value = ("warmup_steps", warmup_steps) if choice == "warmup" else ("batches", batches)
    if not is_count(value):
        raise ValueError(f"kl_weight={choice!r} needs {needed}=, a positive number of steps, got {value}.")
    return {"uniform": uniform, "blundell": blundell, "warmup": warmup}[choice](int(cast(int, value)))
