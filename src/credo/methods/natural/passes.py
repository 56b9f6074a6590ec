"""The passes of an update: what one of them gives, and averages over those of several processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from credo.core.deferred import Number
from credo.core.distributed.process_group import ProcessGroup
from credo.core.example_counts import Counted

if TYPE_CHECKING:
    from credo.methods.natural.stepper import GradientAccumulator


@dataclass
class Pass:
    """One forward and backward pass at a draw.

    Attributes:
        weights: The draw, by parameter name; each tensor takes its gradient.
        noise: The noise in it, if the update rule needs that again.
        counted: What the loss is a mean over.
        size: Its examples relative to those of the first pass of the update.
        loss: The loss.
        gradients: Its gradients.
        curvatures: Estimates of the curvature, which are to be multiplied by `curvature_scale`.
        curvature_scale: See there.
        examples: What squared per-example gradients are divided by for their mean.
    """

    weights: dict[str, Tensor]
    noise: Any
    counted: Counted
    size: float
    loss: Number = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    curvatures: dict[str, Tensor] = field(default_factory=dict)
    curvature_scale: float = 1.0
    examples: float = 1.0


def average_over_processes_(
    found: GradientAccumulator,
    process_group: ProcessGroup,
    own: Iterable[nn.Parameter],
    check: Callable[[float], None],
) -> None:
    """Average gradients, curvatures and losses over the passes of all processes.

    Args:
        found: What this process has gathered.
        process_group: The processes.
        own: Parameters of the likelihood, whose gradients are averaged, too.
        check: Raises an error if it is given a mean loss that is not finite.
    """
    parameters = [*own]
    gradients = [*found.gradients.values(), *(p.grad for p in parameters if p.grad is not None)]
    curvatures = [*found.curvatures.values()]
    found.vectors.clear()
    if found.flat_curvature is not None:
        curvatures.append(found.flat_curvature)
    with found.dropped_on_error(process_group):
        # Sums over examples where these are counted, and else means: processes then have equally many.
        factor = 1 / found.size if found.examples is None else found.examples
        torch._foreach_mul_(gradients, factor)
        if curvatures:
            torch._foreach_mul_(curvatures, found.curvature_scale * factor)
        tensors = [*found.gradients.values(), *curvatures]
        # NaN for what is not known would be taken for a pass that failed.
        loss = 0.0 if found.is_silent else float(found.loss * factor)
        examples = [] if found.examples is None else [found.examples * found.size]
        mean, *examples = process_group.average_step_(tensors, [loss, *examples], parameters)
        found.count, found.curvature_scale = 1, 1.0
        found.size = examples[0] if examples else 1.0
        check(mean)
        found.loss = math.nan if found.is_silent else mean
