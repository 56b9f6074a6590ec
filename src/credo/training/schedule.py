"""Learning-rate schedules as pure functions of the time in epochs, so that a resumed run needs no memory of them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

from credo.core.errors import unknown

Schedule = Callable[[float], float]
SCHEDULES = ("constant", "steps", "cosine")


def make_schedule(
    name: str = "constant",
    *,
    epochs: int,
    milestones: Sequence[float] = (),
    decay: float = 0.1,
    floor: float = 0.0,
    warmup: float = 0.0,
) -> Schedule:
    """Factor on the learning rate at a time in epochs.

    `constant`; `steps`: times `decay` at each of `milestones`; `cosine`: half a cosine from 1 to `floor` over `epochs`.
    `warmup` epochs of linear growth go before all of them.
    """
    if name not in SCHEDULES:
        raise ValueError(unknown("schedule", name, SCHEDULES))
    if name == "steps" and not milestones:
        raise ValueError("schedule='steps' needs milestones=[…], the epochs at which the rate drops.")
    if not 0 <= warmup <= epochs:
        raise ValueError(f"warmup={warmup} must lie between 0 and epochs={epochs}.")
    marks = sorted(milestones)

    def base(time: float) -> float:
        if name == "steps":
            return float(decay ** bisect.bisect_right(marks, time))
        if name == "cosine":
            share = (time - warmup) / max(epochs - warmup, 1e-9)
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(max(share, 0.0), 1.0)))
        return 1.0

    def scale(time: float) -> float:
        return base(time) * (min(1.0, time / warmup) if warmup else 1.0)

    return scale
