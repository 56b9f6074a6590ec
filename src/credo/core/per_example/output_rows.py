"""Find the rows of a network's outputs that a loss has a gradient by; the others do not count in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from credo.core.network.inplace_inputs import first_size
from credo.core.per_example.layer_rules import computes_gradient_of


@dataclass
class Call:
    """One call of the network.

    Attributes:
        args: Positional arguments.
        options: Keyword arguments.
        outputs: How many of its outputs can have a gradient.
        nonzero: Where the gradient by each output is not zero, by its index.
        certain: Rows of each output that are classified with certainty, as in `OutputGradients.certain`.
    """

    args: tuple[Any, ...]
    options: dict[str, Any]
    outputs: int = 0
    nonzero: dict[int, Tensor] = field(default_factory=dict)
    certain: list[Tensor] = field(default_factory=list)


# Logits this far apart have a largest probability of 1 in float32: 1 − e⁻¹⁵ differs from it by three roundings.
_CERTAIN = 15.0


class OutputGradients:
    """Gradients by the outputs of the network's calls, as far as one backward pass has brought them.

    Args:
        weight: One of the tensors that the pass differentiates by: a gradient by inputs only, as an attack inside the
            loss takes it, does not count.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.calls: list[Call] = []

    @property
    def size(self) -> int | None:
        """Rows of the batch, as the network's first input has them."""
        return first_size(self.calls[0].args, self.calls[0].options) if self.calls else None

    @property
    def is_complete(self) -> bool:
        """Whether the gradients by all outputs have arrived."""
        return bool(self.calls) and all(len(call.nonzero) == call.outputs > 0 for call in self.calls)

    def rows(self, size: int) -> Tensor | None:
        """Which of `size` rows have a gradient at any output, [rows]; None if no output begins with that many rows."""
        found = [mask.flatten(1).any(1) if mask.dim() > 1 else mask for mask in self._masks() if len(mask) == size]
        return torch.stack([mask.to(found[0].device) for mask in found]).any(0) if found else None

    def certain(self, size: int) -> Tensor:
        """Which of `size` rows have outputs so far apart that a cross-entropy's gradient rounds to zero, [rows]."""
        found = [rows for call in self.calls for rows in call.certain if len(rows) == size]
        return torch.stack(found).any(0) if found else torch.zeros(size, dtype=torch.bool)

    def counts(self) -> set[int]:
        """Numbers of positions with a gradient, for classes in the second or the last dimension, or in none."""
        masks = list(self._masks())
        inner = [mask.any(dim) for mask in masks if mask.dim() > 1 for dim in (1, -1)]
        return {int(mask.sum()) for mask in (*masks, *inner)}

    def _masks(self) -> Iterator[Tensor]:
        return (mask for call in self.calls for mask in call.nonzero.values())

    def _called(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
        if not torch.is_grad_enabled():
            return
        call = Call(args, options)
        self.calls.append(call)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.requires_grad:
                leaf.register_hook(partial(self._arrived, call, call.outputs))
                call.outputs += 1
                call.certain.append(_is_certain(leaf.detach()))

    def _arrived(self, call: Call, index: int, gradient: Tensor | None) -> None:
        # None: an output of several of one function that the loss does not use.
        if gradient is not None and computes_gradient_of(self.weight):
            mask = gradient.detach() != 0
            call.nonzero[index] = mask | call.nonzero[index] if index in call.nonzero else mask


def _is_certain(outputs: Tensor) -> Tensor:
    if outputs.dim() < 2 or outputs.shape[-1] < 2:
        return torch.zeros(len(outputs), dtype=torch.bool)
    best = (
        outputs.float().flatten(1, -2).topk(2, -1).values if outputs.dim() > 2 else outputs.float().topk(2, -1).values
    )
    gap = best[..., 0] - best[..., 1]
    return (gap if gap.dim() == 1 else gap.amin(-1)).cpu() > _CERTAIN


@contextmanager
def output_gradients(model: nn.Module, weight: Tensor) -> Iterator[OutputGradients]:
    """While open, record calls of the network and the gradients that arrive at their outputs."""
    found = OutputGradients(weight)
    handle = model.register_forward_hook(found._called, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()
