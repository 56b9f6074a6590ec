"""Learning-rate schedules: pure functions of the time in epochs and, for `plateau`, of the validation scores so far.

The scores are in a run's records, so a resumed run needs no other state.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from credo.core.errors import unknown
from credo.core.support.validate import checked_count

Schedule = Callable[[float], float]
# With the options that not all of them have.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": (),
    "steps": ("milestones", "decay"),
    "cosine": ("floor",),
    "plateau": ("decay", "wait", "floor"),
}
# Warm-up of the cosine schedule where none is given, as a fraction of the training: the first steps of a method that
# estimates a curvature are its worst.
WARMUP = 0.05
_UNUSED = {"milestones": [], "decay": 0.1, "floor": 0.0, "wait": 6}


@dataclass(frozen=True)
class Plateau:
    """Multiply the rate by `decay` if validation has not improved for more than `wait` epochs.

    As torch's `ReduceLROnPlateau`: waiting restarts after each drop.

    Args:
        decay: Factor of one drop, between 0 and 1.
        wait: Epochs without a gain to tolerate.
        threshold: Relative gain over the best score that counts as one.
        floor: Smallest factor.
        warmup: Epochs of linear growth from 0.
    """

    decay: float = 0.1
    wait: int = 6
    threshold: float = 1e-4
    floor: float = 0.0
    warmup: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise ValueError(f"decay={self.decay} must lie between 0 and 1: the rate is multiplied by it.")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor={self.floor} must lie between 0 and 1: a fraction of the first rate.")
        checked_count("wait", self.wait, least=0)

    def __call__(self, time: float) -> float:
        """Return the factor before any validation."""
        return self.after(())(time)

    def after(self, scores: Sequence[float]) -> Schedule:
        """Return the schedule of the next epoch, given the scores of all epochs so far, larger being better."""
        factor, best, bad = 1.0, -math.inf, 0
        for score in scores:
            if score > best + self.threshold * abs(best) or best == -math.inf:
                best, bad = score, 0
            else:
                bad += 1
            if bad > self.wait:
                factor, bad = max(factor * self.decay, self.floor), 0
        return lambda time: factor * _warm(time, self.warmup)


def make_schedule(
    name: str = "constant",
    *,
    epochs: int,
    milestones: Sequence[float] = (),
    decay: float = 0.1,
    floor: float = 0.0,
    warmup: float | None = 0.0,
    wait: int = 6,
) -> Schedule:
    """Return the factor on the learning rate as a function of the time in epochs.

    Args:
        name: "constant"; "steps": times `decay` at each of `milestones`; "cosine": half a cosine from 1 to `floor` over
            `epochs`; "plateau": times `decay` when validation has not improved for more than `wait` epochs.
        epochs: Length of the training.
        milestones: Epochs at which the rate drops.
        decay: Factor of one drop.
        floor: Smallest factor of "cosine" and "plateau".
        warmup: Epochs of linear growth from 0 at the beginning of any of them; None: a twentieth of `epochs` for
            "cosine", none for the others.
        wait: Epochs without a gain that "plateau" tolerates.
    """
    if name not in SCHEDULES:
        raise ValueError(unknown("schedule", name, SCHEDULES))
    if name == "steps" and not milestones:
        raise ValueError("schedule='steps' needs milestones=[…], the epochs at which the rate drops.")
    given = {"milestones": list(milestones), "decay": decay, "floor": floor, "wait": wait}
    for option, value in given.items():
        if value != _UNUSED[option] and option not in SCHEDULES[name]:
            others = [repr(other) for other, options in SCHEDULES.items() if option in options]
            raise ValueError(
                f"schedule={name!r} has no {option}, and {option}={value} was given: leave it out, or choose "
                f"schedule={' or '.join(others)}."
            )
    if warmup is None:
        warmup = WARMUP * epochs if name == "cosine" else 0.0
    if not 0 <= warmup <= epochs:
        raise ValueError(f"warmup={warmup} must lie between 0 and epochs={epochs}.")
    if name == "plateau":
        return Plateau(decay=decay, wait=wait, floor=floor, warmup=warmup)
    marks = sorted(milestones)

    def base(time: float) -> float:
        if name == "steps":
            return float(decay ** bisect.bisect_right(marks, time))
        if name == "cosine":
            fraction = (time - warmup) / max(epochs - warmup, 1e-9)
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(max(fraction, 0.0), 1.0)))
        return 1.0

    def scale(time: float) -> float:
        return base(time) * _warm(time, warmup)

    return scale


def _warm(time: float, warmup: float) -> float:
    return min(1.0, time / warmup) if warmup else 1.0
