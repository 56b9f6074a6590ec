"""Tell tokens from position ids among the indices that an embedding gets.

An input of shape [n] is one token for each of n examples, or the positions 0, 1, … of a sequence that happens to be as
long as the batch; the shape is the same, but the rows of the second belong to no example. Integers have no autograd
graph, so values and memory decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def are_consecutive(x: Tensor) -> bool:
    """Whether these are consecutive integers: possibly positions in a sequence, even if as many as examples."""
    return len(x) > 1 and not x.is_floating_point() and bool((x.diff() == 1).all())


def are_inputs(x: Tensor, inputs: Iterable[Any]) -> bool:
    """Whether these integers, one for each example, are an input of the network or a column of one.

    Equal values do not suffice where sequences have as many positions as there are examples: memory must be shared.

    Args:
        x: The integers.
        inputs: What the network was called with.
    """
    size = len(x)
    found = [i for i in inputs if isinstance(i, Tensor) and i.dim() and i.shape[0] == size and not i.is_complex()]
    if any(_is_view(x, one) for one in found):
        return True
    if any(size in one.shape[1:] for one in found):
        return False
    return any(bool((one.reshape(size, -1) == x.to(one.device).unsqueeze(1)).all(0).any()) for one in found)


def _is_view(x: Tensor, of: Tensor) -> bool:
    same = x.untyped_storage().data_ptr() == of.untyped_storage().data_ptr() != 0
    return same and x.stride(0) == of.stride(0)
