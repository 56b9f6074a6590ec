"""What is checked in the first steps of a method that takes rows for examples, with a warning where they are not."""

from __future__ import annotations

import math
import warnings

from torch import nn

from credo.core.errors import ExampleCountWarning
from credo.core.example_counts import Counted
from credo.core.per_example.interaction import rows_interact
from credo.core.per_example.outputs import OutputGradients

_PASSES = 3


class FirstSteps:
    """Counts the passes that are still looked at; every warning comes once.

    Args:
        passes: How many passes have their rows without a gradient counted.
        interaction: Whether the first pass is followed by one more, which looks for rows that act on each other.
    """

    def __init__(self, passes: int = _PASSES, *, interaction: bool = True) -> None:
        self.passes, self._interaction = passes, interaction

    def check(self, model: nn.Module, outputs: OutputGradients, counted: Counted) -> None:
        """One pass is over, of this loss; its hooks must be gone."""
        size = outputs.size
        if self.passes <= 0 or not size:
            return
        self.passes -= 1
        if (message := _miscounted(outputs, counted, size)) is not None:
            self.passes = 0
            warnings.warn(message, ExampleCountWarning, stacklevel=2)
        if self._interaction:
            self._interaction = False
            if rows_interact(model, outputs.calls[0], size):
                warnings.warn(_INTERACTION, ExampleCountWarning, stacklevel=2)


def _miscounted(outputs: OutputGradients, counted: Counted, size: int) -> str | None:
    """What to say where the rows with a gradient are not as many as the loss is said to be a mean over."""
    rows = outputs.rows(size)
    if rows is None or counted.weights is not None:
        return None
    rows = rows.cpu() | outputs.certain(size)  # rows that are answered for sure count, though nothing is left to learn
    found = int(rows.sum())
    if found == 0:  # a loss that has nothing to learn says nothing about what counts
        return None
    advice = (
        f"If the loss is a mean over the others only (ignore_index, a mask), give step(nll, examples={found}), or "
        "weights= with a 0 for each row that does not count; else curvature, a mean of squares, is wrong by the ratio "
        "of the two numbers. If rows without a gradient count all the same (a hinge loss, an output that is cut off), "
        "ignore this."
    )
    missing = f"{size - found} of {size} rows have no gradient at the network's output"
    if counted.examples is None:
        return None if found == size else f"{missing}, and squares of gradients count all {size}. {advice}"
    if any(math.isclose(counted.examples, count) for count in {found, *outputs.counts()}):
        return None
    return f"examples={counted.examples:g}, but {missing}. {advice}"


_INTERACTION = (
    "Rows of the batch act on each other in this network: the output of one depends on the input of another, as in "
    "graphs or with attention over the batch. Squares of per-example gradients count the gradient that arrives at a "
    "row of a layer as that row's own, which is an approximation then."
)
