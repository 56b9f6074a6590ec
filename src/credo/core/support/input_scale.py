"""By how much inputs are divided before a network sees them."""

from __future__ import annotations

from torch import Tensor

# Standard deviations that a training value may lie from the mean. A feature that is the same in nearly all rows has a
# tiny standard deviation, and a row that differs would reach the network as a huge number.
FARTHEST = 10.0


def input_scale(std: Tensor, farthest: Tensor) -> Tensor:
    """Standard deviations, raised where training values would lie more than `FARTHEST` of them from the mean.

    Args:
        std: Standard deviation of each feature.
        farthest: Largest distance of a training value from the feature's mean.
    """
    return std.maximum(farthest / FARTHEST)
