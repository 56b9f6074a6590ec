"""Warn of a loss that is a sum over the batch, where every method needs a mean.

The gradient of a cross-entropy by a row's logits is p − q, whose absolute values sum to 2 at most. So they sum to 2 at
most over the whole batch for a mean over its rows, and to about n times as much for a sum over n rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from credo.core.errors import ExampleCountWarning
from credo.core.support.user_warnings import warn

if TYPE_CHECKING:
    from credo.core.posterior import Posterior

# A loss with several terms may have a few times the gradient of one mean; a sum of so many rows has more.
_MOST, _FEWEST_ROWS = 8.0, 12
_ROUNDING = 1e-3


@contextmanager
def reduction_watched(posterior: Posterior) -> Iterator[None]:
    """Look at the gradient that arrives at the network's outputs, and warn if no mean of cross-entropies can have it.

    Costs no pass. Only losses whose gradients by a row's outputs sum to zero are judged, as those of a softmax do, and
    only outputs [rows, classes]: at positions of a sequence a sum may be meant.

    Args:
        posterior: Before its first step.
    """
    found: list[tuple[float, int]] = []

    def at_output(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad and output.dim() == 2 and min(output.shape) > 1:
            output.register_hook(at_gradient)

    def at_gradient(gradient: Tensor) -> None:
        sizes = gradient.detach().float().abs().sum(1)
        balanced = gradient.detach().float().sum(1).abs() <= _ROUNDING * sizes
        if bool(balanced.all()):
            found.append((float(sizes.sum()) / posterior.loss_scale, len(gradient)))

    handles = [part._net.register_forward_hook(at_output) for part in posterior.all_posteriors()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    rows = found[0][1] if found else 0
    if rows >= _FEWEST_ROWS and found[0][0] > _MOST:
        warn(
            f"The loss seems to be a sum over the {rows} rows of the batch: its gradient by the network's outputs is "
            f"{found[0][0] / 2:.0f} times the largest that a mean of cross-entropies can have. Give their mean "
            "(reduction='mean'): methods multiply it by data_size, so that a sum makes the posterior far too narrow.",
            ExampleCountWarning,
        )
