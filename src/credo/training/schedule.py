"""Learning-rate schedules: pure functions of the time in epochs, or of that and the validation scores so far.

So a resumed run, whose records hold the scores, needs no other memory of them.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from credo.core.errors import unknown
from credo.core.support.validate import checked_count

Schedule = Callable[[float], float]
# Each with the options that only some of them have.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": (),
    "steps": ("milestones", "decay"),
    "cosine": ("floor",),
    "plateau": ("decay", "wait", "floor"),
}
_UNUSED = {"milestones": [], "decay": 0.1, "floor": 0.0, "wait": 6}


@dataclass(frozen=True)
class Plateau:
    """Times `decay` whenever the monitored validation score has not improved for more than `wait` epochs.

    As torch's `ReduceLROnPlateau`: a gain counts if it is more than `threshold` of the best score so far, and the
    waiting begins anew after each drop. The factor never falls below `floor`.
    """

    decay: float = 0.1
    wait: int = 6
    threshold: float = 1e-4
    floor: float = 0.0
    warmup: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise ValueError(f"decay={self.decay} must lie between 0 and 1: what the rate is multiplied with.")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor={self.floor} must lie between 0 and 1, a share of the first rate.")
        checked_count("wait", self.wait, least=0)

    def __call__(self, time: float) -> float:
        """The factor while nothing has been validated yet."""
        return self.after(())(time)

    def after(self, scores: Sequence[float]) -> Schedule:
        """The schedule of the next epoch, given the scores of all before it, larger ones being better."""
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
    warmup: float = 0.0,
    wait: int = 6,
) -> Schedule:
    """Factor on the learning rate at a time in epochs.

    `constant`; `steps`: times `decay` at each of `milestones`; `cosine`: half a cosine from 1 to `floor` over `epochs`;
    `plateau`: times `decay` when validation has not improved for more than `wait` epochs. `warmup` epochs of linear
    growth go before all of them.
    """
    if name not in SCHEDULES:
        raise ValueError(unknown("schedule", name, SCHEDULES))
    if name == "steps" and not milestones:
        raise ValueError("schedule='steps' needs milestones=[…], the epochs at which the rate drops.")
    given = {"milestones": list(milestones), "decay": decay, "floor": floor, "wait": wait}
    for option, value in given.items():
        if value != _UNUSED[option] and option not in SCHEDULES[name]:
            those = [repr(other) for other, options in SCHEDULES.items() if option in options]
            raise ValueError(
                f"schedule={name!r} has no {option}, and {option}={value} was given: leave it out, or choose "
                f"schedule={' or '.join(those)}."
            )
    if not 0 <= warmup <= epochs:
        raise ValueError(f"warmup={warmup} must lie between 0 and epochs={epochs}.")
    if name == "plateau":
        return Plateau(decay=decay, wait=wait, floor=floor, warmup=warmup)
    marks = sorted(milestones)

    def base(time: float) -> float:
        if name == "steps":
            return float(decay ** bisect.bisect_right(marks, time))
        if name == "cosine":
            share = (time - warmup) / max(epochs - warmup, 1e-9)
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(max(share, 0.0), 1.0)))
        return 1.0

    def scale(time: float) -> float:
        return base(time) * _warm(time, warmup)

    return scale


def _warm(time: float, warmup: float) -> float:
    return min(1.0, time / warmup) if warmup else 1.0
