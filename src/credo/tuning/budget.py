"""The budget of `auto`: passes over the training rows, or a wall time that is kept by looking at the clock."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field

from credo.core.support.validate import is_number

# What is spent where no budget is given: so many steps, but no longer than this.
DEFAULT_STEPS, DEFAULT_TIME = 10_000, "10min"
_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}


def seconds_of(budget: str | float) -> float:
    """Seconds of a wall time such as "90s", "10min" or "2h"; numbers are seconds.

    Args:
        budget: The text or number.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(s|sec|min|h)\s*", budget) if isinstance(budget, str) else None
    value = float(found[1]) * _UNITS[found[2]] if found else budget
    if isinstance(value, str) or not is_number(value) or not 0 < value < float("inf"):
        raise ValueError(f"budget={budget!r:.40} must be a wall time such as '90s', '10min' or '2h', or seconds.")
    return float(value)


@dataclass
class Budget:
    """What may be spent, and what has been.

    Attributes:
        passes: Passes over the training rows that are planned in all.
        seconds: Wall time that may pass; None: only passes count, and nothing depends on the clock.
        spent: Passes that were made.
        start: When the clock started.
        scoring: The longest that one candidate took on the held-out rows, in seconds.
        most: Passes that are enough, however much time there is.
        fastest: The least time that a pass took, in seconds.
    """

    passes: float
    seconds: float | None = None
    spent: float = 0.0
    start: float = field(default_factory=time.monotonic)
    scoring: float = 0.0
    most: float = math.inf
    fastest: float = math.inf

    @property
    def left(self) -> float:
        """Passes that may still be made."""
        return max(0.0, self.passes - self.spent)

    @property
    def seconds_left(self) -> float:
        """Wall time that is left; infinite if only passes count."""
        return float("inf") if self.seconds is None else self.start + self.seconds - time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether there is no time for another pass and its scoring, as far as any was timed."""
        return self.seconds_left <= 0 or (self.fastest < math.inf and self.seconds_left < self.fastest + self.scoring)

    def deadline(self, passes: float, scoring: float | None = None) -> float:
        """When a training of so many passes must end, by `time.monotonic`, so that all others keep their part.

        Its own scoring and as much for the report are kept free.

        Args:
            passes: Passes that it is planned to make.
            scoring: Seconds that its scoring takes; None: as long as the longest before.
        """
        if self.seconds is None:
            return float("inf")
        part = min(1.0, passes / self.left) if self.left > 0 else 1.0
        return time.monotonic() + part * max(
            0.0, self.seconds_left - 2 * (self.scoring if scoring is None else scoring)
        )

    def replan(self, seconds_a_pass: float, scoring: float | None = None) -> None:
        """Correct the number of passes to what the remaining time has room for; without a clock nothing changes.

        Args:
            seconds_a_pass: What a pass took lately.
            scoring: Seconds that the next scoring takes; None: as long as the longest before.
        """
        if self.seconds is not None and seconds_a_pass > 0:
            kept_free = 2 * (self.scoring if scoring is None else scoring)
            self.passes = min(self.most, self.spent + max(0.0, self.seconds_left - kept_free) / seconds_a_pass)
