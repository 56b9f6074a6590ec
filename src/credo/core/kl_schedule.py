"""How much the KL counts at each step: weights that average one over an epoch, but for a warm-up.

The objective is mean NLL + (temperature·weight(step)/data_size)·KL. A mini-batch share πᵢ of Blundell et al.
(2015), made for a batch's *summed* NLL with Σᵢ πᵢ = 1, is the weight batches·πᵢ here.
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
    """πᵢ = 1/batches: the same as `constant`, under the name it has in the literature."""
    share = 1 / batches
    return lambda step: batches * share


def blundell(batches: int) -> KLWeight:
    """πᵢ = 2^(B−i)/(2^B−1), i = 1…B: half of the KL in the first batch of an epoch, 99.9 % in the first ten."""

    def weight(step: int) -> float:
        place = step % batches + 1
        # 2^(B−i)/(2^B−1) without the overflow of 2^B.
        return float(batches * 2.0**-place / (1 - 2.0**-batches))

    return weight


def warmup(steps: int) -> KLWeight:
    """Linear from 0 to 1 over the first `steps` steps, then 1 (Sønderby et al. 2016)."""
    return lambda step: min(1.0, step / steps)


def forgotten(step: int) -> float:
    """The weight of a posterior from a file, where it was a function: known to nobody, so there is no step with it."""
    raise ValueError(
        "This posterior has no kl_weight to train with: it was given as a function, which a file cannot hold. Give it "
        "again, credo.load(path, kl_weight=...)."
    )


KL_WEIGHTS = ("constant", "uniform", "blundell", "warmup")


def make_kl_weight(choice: str | KLWeight | None, *, batches: int | None, warmup_steps: int | None) -> KLWeight:
    """The weight by its name; `blundell` and `uniform` need `batches`, `warmup` needs `warmup_steps`.

    None is a weight that is not known (any more): `forgotten`.
    """
    if choice is None:
        return forgotten
    if callable(choice):
        return choice
    if choice not in KL_WEIGHTS:
        raise ValueError(unknown("kl_weight", choice, KL_WEIGHTS))
    if warmup_steps is not None and choice != "warmup":
        raise ValueError(
            f"warmup_steps={warmup_steps} has no meaning with kl_weight={choice!r}: use kl_weight='warmup'."
        )
    if choice == "constant":
        return constant
    needed, value = ("warmup_steps", warmup_steps) if choice == "warmup" else ("batches", batches)
    if not is_count(value):
        raise ValueError(f"kl_weight={choice!r} needs {needed}=, a positive number of steps, got {value}.")
    return {"uniform": uniform, "blundell": blundell, "warmup": warmup}[choice](int(cast(int, value)))
