"""Whether whole numbers that reach an embedding are tokens, one an example, or places in a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def are_run(x: Tensor) -> bool:
    """Whether these are consecutive numbers: perhaps places in a sequence, even if as many as there are examples."""
    return len(x) > 1 and not x.is_floating_point() and bool((x.diff() == 1).all())


def are_given(x: Tensor, inputs: Iterable[Any]) -> bool:
    """Whether these numbers, one an example, are an input of the network or a column of one.

    Equal values are not enough where sequences have as many places as there are examples: then memory must be shared.
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
