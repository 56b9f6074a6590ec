"""The group of HMC's arguments that say how its chains move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from credo.core.arguments import Group
from credo.core.support.validate import checked_count, is_number


@dataclass(frozen=True)
class ChainSettings(Group):
    """How the chains of HMC begin and move.

    Attributes:
        thin: Transitions from one kept sample of a chain to the next.
        start_steps: Steps of Adam over all data that take each chain from fresh weights (`reset_parameters`) to its
            start.
        target_accept: Probability of acceptance that the step size aims at: higher is slower, with fewer divergences.
        max_steps: Most leapfrog steps of a transition. Warm-up would often choose more for networks, whose weights
            move along directions that hardly change the function.
        float64: Run the chains in double precision; samples are kept in the network's.
    """

    argument: ClassVar[str] = "settings"
    short: ClassVar[str] = "thin"

    thin: int = 5
    start_steps: int = 500
    target_accept: float = 0.8
    max_steps: int = 128
    float64: bool = False

    def __post_init__(self) -> None:
        checked_count("settings.thin", self.thin, what="transitions")
        checked_count("settings.start_steps", self.start_steps, least=0, what="steps")
        checked_count("settings.max_steps", self.max_steps, what="leapfrog steps")
        if not is_number(self.target_accept) or not 0 < self.target_accept < 1:
            raise ValueError(f"settings.target_accept={self.target_accept!r} must be a probability, such as 0.8.")


RENAMED_SETTINGS = {
    name: f"settings.{name}" for name in ("thin", "start_steps", "target_accept", "max_steps", "float64")
}
