"""Learning rates of stochastic-gradient samplers, and the steps in which they add noise and keep samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

# γ of the decaying schedule ε(1 + k/b)^−γ (Welling and Teh 2011: 0.5 < γ ≤ 1), and its factor at the end of a training.
DECAY_POWER, LAST_FACTOR = 0.55, 0.1
SCHEDULES = ("constant", "decay", "cyclical")


def cyclical_factor(step: int, length: int, cycles: int) -> float:
    """½(1 + cos(π·mod(k, T/M)/(T/M))), the factor on the rate in step k (Zhang et al. 2020).

    Args:
        step: Number k of the step, from 0.
        length: Steps T of the training.
        cycles: Number M of cycles.
    """
    return 0.5 * (1 + math.cos(math.pi * (step * cycles % length) / length))


def decay_factor(step: int, length: int) -> float:
    """(1 + k/b)^−γ, with b such that it is a tenth at the end of the training.

    Args:
        step: Number k of the step, from 0.
        length: Steps of the training.
    """
    b = length / (LAST_FACTOR ** (-1 / DECAY_POWER) - 1)
    return float((1 + step / b) ** -DECAY_POWER)


@dataclass(frozen=True)
class Stages:
    """What a step does: every cycle begins with a burn-in, and keeps samples in the rest of it.

    Attributes:
        schedule: A name of `SCHEDULES`; None: the rate is not decided here.
        length: Steps of the planned training; 0: there is no plan, the rate is constant and there is one endless cycle.
        cycles: Number of cycles; 1 unless the schedule is cyclical.
        burn_in: Steps of each cycle before samples are kept, or the fraction of it that they are.
        every: Steps from one sample to the next.
    """

    schedule: str | None
    length: int
    cycles: int
    burn_in: float
    every: int
    unplanned_burn_in: ClassVar[int] = 200

    @property
    def is_cyclical(self) -> bool:
        """Whether rate and burn-in begin again with every cycle."""
        return self.schedule == "cyclical" and self.length > 0

    def factor(self, step: int) -> float | None:
        """The factor on the learning rate in a step; None if it is not decided here."""
        if self.schedule is None or not self.length:
            return None
        if self.schedule == "cyclical":
            return cyclical_factor(step, self.length, self.cycles)
        return decay_factor(step, self.length) if self.schedule == "decay" else 1.0

    def burn_in_steps(self) -> int:
        """Steps of each cycle (of the training) before samples are kept; of a planned one at least one is left."""
        if isinstance(self.burn_in, int):
            return self.burn_in
        if not self.length:
            return self.unplanned_burn_in
        whole = self.length / self.cycles
        return min(round(self.burn_in * whole), max(math.ceil(whole) - 1, 0))

    def steps_sampling(self, step: int) -> int:
        """Number of steps that sampling has lasted in this cycle, with this one; 0 or less in the burn-in."""
        position = math.floor((step * self.cycles % self.length) / self.cycles) if self.is_cyclical else step
        return position + 1 - self.burn_in_steps()

    def is_kept(self, step: int) -> bool:
        """Whether the state after a step is a sample."""
        done = self.steps_sampling(step)
        return done > 0 and done % self.every == 0
