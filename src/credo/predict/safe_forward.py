"""Passes that leave the caller's inputs as they are, also those of networks that write into their input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from credo.core.errors import CredoError


class Passes:
    """Runs a network many times on one input, on copies of it until a pass has left its copy alone.

    Networks that change their input in place (`x -= 1`, a first `nn.ReLU(inplace=True)`) get a copy every time.
    """

    def __init__(self) -> None:
        self._copies = True

    def __call__(self, net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """One pass; an input that changes in spite of all is an error, since later draws would see it changed."""
        given = x.clone() if self._copies else x
        if given.is_inference() or x.is_inference():  # torch does not count changes of these
            return net(given)
        before = given._version
        result = net(given)
        is_changed = given._version != before
        if self._copies:
            # Values, too: a change through `.data` or NumPy is not counted.
            self._copies = is_changed or not torch.equal(given, x)
        elif is_changed:
            raise CredoError(
                "The network changed its input in place, though it did not in its first pass: the inputs given are no "
                "longer what they were. Let its forward work on a copy: x = x.clone()."
            )
        return result
