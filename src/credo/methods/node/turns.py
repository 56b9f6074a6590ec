"""Node values of a batch's rows, which take the components of a mixture by turns."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=16)
def by_turns(rows: int, components: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Entry [s, k, r] is 1 where row r has component k if row 0 has component s, else 0; nobody may change it.

    Args:
        rows: Rows of a batch.
        components: Number of components.
        device: Where it is made.
        dtype: Its type.
    """
    with torch.inference_mode(False):
        start, component, row = (torch.arange(n, device=device) for n in (components, components, rows))
        return ((start.view(-1, 1, 1) + row - component.view(-1, 1)) % components == 0).to(dtype)


def values_by_turns(mean: Tensor, std: Tensor, noise: Tensor, turns: Tensor) -> Tensor:
    """mean + std·noise of each row's component, [rows, nodes].

    Args:
        mean: Means, [components, nodes].
        std: Standard deviations, [components, nodes].
        noise: Standard normal, [rows, nodes].
        turns: 1 where a row has a component, else 0, [components, rows].
    """
    values: Tensor = _ValuesByTurns.apply(mean, std, noise, turns)  # type: ignore[no-untyped-call]
    return values


class _ValuesByTurns(torch.autograd.Function):
    """Autograd function of `values_by_turns`: products with `turns` are fewer operators than selecting rows."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, std: Tensor, noise: Tensor, turns: Tensor) -> Tensor:
        """As `values_by_turns`; ctx is autograd's."""
        ctx.save_for_backward(noise, turns)
        return torch.addcmul(turns.t() @ mean, turns.t() @ std, noise)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        noise, turns = ctx.saved_tensors
        (g,) = gradients
        return turns @ g, turns @ (g * noise), None, None
