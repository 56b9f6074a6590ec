"""Passes that leave the caller's inputs as they are, also those of networks that write into their input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from credo.core.errors import CredoError


@dataclass(frozen=True)
class Passes:
    """How a network is run many times on one input: on a copy each time if it writes into what it gets."""

    copies: bool

    def input(self, x: Tensor) -> Tensor:
        """What to give to one pass."""
        return x.clone() if self.copies else x

    def __call__(self, net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """One pass; an input that changes in spite of all is an error, since later draws would see it changed."""
        given = self.input(x)
        before = None if self.copies else given._version
        result = net(given)
        if before is not None and given._version != before:
            raise CredoError(
                "The network changed its input in place, though it did not when tried on the first two rows: the "
                "inputs given are no longer what they were. Let its forward work on a copy: x = x.clone()."
            )
        return result


@torch.no_grad()
def changes_input(model: nn.Module, x: Tensor) -> bool:
    """Whether the network writes into its input, as `x -= 1` or a first `nn.ReLU(inplace=True)` do; tried on two rows.

    True also where it cannot be known: in inference mode torch does not count changes.
    """
    probe = x[:2].clone()
    if probe.is_inference() or x.is_inference():
        return True
    before = probe._version
    try:
        model(probe)
    except Exception:  # whatever the network says, it says it again in the real pass
        return True
    # Values, too: a change through `.data` or NumPy is not counted.
    return probe._version != before or not torch.equal(probe, x[:2])
