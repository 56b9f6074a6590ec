"""The KL term of an objective: how it is computed, and schedules for its weight.

The objective is mean NLL + (temperature·weight(step)/data_size)·KL. Except for a warm-up, weights average one over an
epoch. The mini-batch weights πᵢ of Blundell et al. (2015), defined for a batch's *summed* NLL with Σᵢ πᵢ = 1,
correspond to batches·πᵢ here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast

from credo.core.arguments import Group
from credo.core.errors import unknown
from credo.core.support.validate import is_count

KLWeight = Callable[[int], float]
KL_WEIGHTS = ("constant", "uniform", "blundell", "warmup")
RENAMED_KL = {
    "kl": "kl_term.estimator",
    "kl_weight": "kl_term.weight",
    "batches": "kl_term.batches",
    "warmup_steps": "kl_term.warmup_steps",
}


@dataclass(frozen=True)
class KLTerm(Group):
    """How the KL from the prior is computed, and how it is weighted at each step.

    Attributes:
        estimator: `"auto"`: closed form where the prior has one; `"closed"` requires it; `"monte-carlo"`: log q(w) −
            log p(w) at the draws; `"ard"`: ½Σ log(1 + μ²/σ²), the KL from N(0, s²) with the best s for each weight.
        weight: Factor on the KL at each step: a name of `KL_WEIGHTS` or a function of the step. None for a function
            that a file could not hold: then a step raises.
        batches: Batches an epoch, for the weights `"blundell"` and `"uniform"`.
        warmup_steps: Steps until the full KL counts, for the weight `"warmup"`.
    """

    argument: ClassVar[str] = "kl_term"
    short: ClassVar[str] = "estimator"

    estimator: str = "auto"
    weight: str | KLWeight | None = "constant"
    batches: int | None = None
    warmup_steps: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.estimator, str):
            raise ValueError(f"kl_term={self.estimator!r:.80} must be a name, or a mapping such as {{'weight': …}}.")
        if not callable(self.weight) and self.weight not in (None, *KL_WEIGHTS):
            raise ValueError(unknown("kl_term.weight", str(self.weight), KL_WEIGHTS))
        if self.warmup_steps is not None and self.weight != "warmup":
            raise ValueError(
                f"kl_term.warmup_steps={self.warmup_steps} has no effect with kl_term.weight={self.weight!r}: use "
                "weight='warmup'."
            )
        needed = {"warmup": "warmup_steps", "blundell": "batches", "uniform": "batches"}.get(str(self.weight))
        if needed is not None and not is_count(getattr(self, needed)):
            raise ValueError(
                f"kl_term.weight={self.weight!r} needs {needed}, a positive number of steps, got "
                f"{getattr(self, needed)}."
            )

    def schedule(self) -> KLWeight:
        """The weight as a function of the step."""
        if self.weight is None:
            return forgotten
        if callable(self.weight):
            return self.weight
        if self.weight == "constant":
            return constant
        if self.weight == "warmup":
            return warmup(int(cast(int, self.warmup_steps)))
        return {"uniform": uniform, "blundell": blundell}[self.weight](int(cast(int, self.batches)))


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
        "This posterior has no weight of the KL to train with: it was a function, which a file cannot store. Pass it "
        "again: credo.load(path, kl_term={'weight': ...})."
    )
