"""Fair timing on a machine that is never quite still: everybody in turn, and ratios within each turn.

A machine's speed drifts over seconds (clock rate, other processes), by more than the differences of interest. So all
contenders run in one process in short blocks, one block each a round, in an order drawn anew for every round; a
contender's time is divided by the reference's time of the *same round*, and what is reported is the median of those
ratios with their 10 and 90 % quantiles.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Work = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios of all rounds, and the range that holds the middle 80 % of them."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def interleave(
    contenders: Mapping[str, Work],
    *,
    rounds: int,
    clock: Clock = time.perf_counter,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of one block of every contender in each round.

    Garbage is collected between rounds, never inside a block.
    """
    order = list(contenders)
    shuffle = random.Random(0).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.freeze()  # what exists now stays: the collections between rounds need not look at it
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                start = clock()
                contenders[name]()
                seconds[name].append(clock() - start)
            gc.collect()
            on_round()
    finally:
        gc.enable()
        gc.unfreeze()
    return seconds


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> Ratio:
    """What one contender took relative to the reference, round by round."""
    low, median, high = np.quantile(np.divide(seconds, reference), (0.1, 0.5, 0.9))
    return Ratio(float(median), float(low), float(high))


def block_length(work: Work, *, seconds: float, most: int) -> int:
    """How often to repeat `work` so that a block takes about that long; at least once, at most `most` times."""
    start = time.perf_counter()
    work()
    took = time.perf_counter() - start
    return max(1, min(most, round(seconds / took)))


def repeated(work: Work, times: int) -> Work:
    """A block of several repetitions."""

    def block() -> None:
        for _ in range(times):
            work()

    return block
