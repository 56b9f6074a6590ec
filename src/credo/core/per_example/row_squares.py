"""Squares where an example has one row at a layer: of all such layers together, in a few operators.

An example's gradient is the outer product g aᵀ by the weight of a linear layer, and g by a bias. So the sums over the
examples are Σ (g aᵀ)² = (g∘g)ᵀ(a∘a) and Σ g∘g, and the rows g of all layers can be squared and summed as one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.core.kernels.flat import zero
from credo.core.per_example.layer_rules import full_precision, widened


@dataclass(frozen=True)
class Rows:
    """What arrived at one layer.

    Attributes:
        names: Names in the network of the wanted parameters, by `"weight"` and `"bias"`.
        a: The layer's inputs [examples, in]; None if no weight is wanted.
        g: The gradients by its outputs, or of its bias, [examples, out].
    """

    names: Mapping[str, str]
    a: Tensor | None
    g: Tensor


class RowSquares:
    """Collects rows in a backward pass, at the end of which their squares are summed.

    Args:
        put: Takes the squares of a parameter by its name, times examples².
    """

    def __init__(self, put: Callable[[str, Tensor], None]) -> None:
        self._put = put
        self._waiting: list[Rows] = []

    def add(self, rows: Rows) -> None:
        """Take rows, within a backward pass."""
        if not self._waiting:  # not later than the pass: then somebody may write into inputs again
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._waiting.append(rows)

    @torch.no_grad()
    def _finish(self) -> None:
        waiting, self._waiting = self._waiting, []
        alike: dict[tuple[torch.device, torch.dtype, int], list[Rows]] = {}
        for rows in waiting:
            alike.setdefault((rows.g.device, rows.g.dtype, len(rows.g)), []).append(rows)
        for (device, _, _), group in alike.items():
            with full_precision(device.type):
                self._square(group)

    def _square(self, group: list[Rows]) -> None:
        whole = torch.cat([rows.g for rows in group], 1) if len(group) > 1 else group[0].g
        squared = torch.addcmul(zero(whole.device, whole.dtype), whole, whole, value=float(len(whole)) ** 2)
        sizes = [rows.g.shape[1] for rows in group]
        inputs = [widened(rows.a) for rows in group if rows.a is not None]
        squared_inputs = iter(torch._foreach_mul(inputs, inputs) if inputs else ())
        parts = zip(group, squared.split(sizes, 1), squared.sum(0).split(sizes), strict=True)
        for rows, part, by_bias in parts:
            if rows.a is not None:
                self._put(rows.names["weight"], torch.mm(part.t(), next(squared_inputs)))
            if "bias" in rows.names:
                self._put(rows.names["bias"], by_bias)
