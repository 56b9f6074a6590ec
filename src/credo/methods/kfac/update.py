"""The arithmetic of K-FAC over its blocks: what an update does to each, how far it may go, the KL that results.

Nothing here writes: changes are complete before any of them is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from credo.core.network.flat_layout import Layout
from credo.core.prior import Gaussian
from credo.methods.kfac.blocks import Block, Change
from credo.methods.natural.accumulator import Gathered
from credo.methods.natural.param_vector import precision_of


def part(block: Block, value: float | Tensor, layout: Layout) -> float | Tensor:
    """A number, or a block's part of a flat vector, in the shape of its matrix."""
    return value if not isinstance(value, Tensor) else block.matrix(layout.split(value, cast=False))


@dataclass(frozen=True)
class BlockPrior:
    """A Gaussian prior over the random parameters, block by block."""

    prior: Gaussian
    layout: Layout

    def precision(self, block: Block) -> float | Tensor:
        """The block's entries of the precision."""
        return part(block, precision_of(self.prior), self.layout)

    def offset(self, block: Block, means: Mapping[str, Tensor]) -> Tensor:
        """How far the block's means are from those of the prior."""
        return block.matrix(means) - part(block, self.prior.mean, self.layout)


@dataclass(frozen=True)
class Rule:
    """The numbers of one update: τ/N, what momentum and old curvature keep, the damping, whether inverses are due.

    `momentum` may be a vector over all trainable parameters.
    """

    scale: float
    momentum: float | Tensor
    decay: float
    damping: float
    invert: bool


def change_of(
    block: Block, found: Gathered, means: Mapping[str, Tensor], prior: BlockPrior, rule: Rule, layout: Layout
) -> Change:
    """What an update with this rule does to a block; `layout` is that of all trainable parameters."""
    shift: float | Tensor = 0.0
    gradient = block.matrix(found.gradients) / found.shares
    if block.is_random:
        shift = rule.scale * prior.precision(block)
        gradient += shift * prior.offset(block, means)
    curvature = inverse = None
    if found.curvatures:
        curvature = block.average(found.curvatures, rule.decay, 1 / found.shares)
    if rule.invert:
        inverse = block.invert(curvature or block.current(block.averages), rule.damping + shift)
    momentum = block.momentum * part(block, rule.momentum, layout) + gradient
    step = block.precondition(momentum, inverse or block.current(block.inverses))
    return Change(curvature, inverse, momentum, step)


def trust(changes: Sequence[Change], rates: Sequence[float | Tensor], scale: float, clip: float | None) -> float:
    """What keeps lr²·mᵀF⁻¹m, about twice the KL between old and new predictions, at `clip` (Ba et al. 2017).

    lr is `scale` times the rates.
    """
    if clip is None:
        return 1.0
    each = ((r**2 * c.step * c.momentum).double().sum() for c, r in zip(changes, rates, strict=True))
    form = scale**2 * float(sum(each))
    return min(1.0, math.sqrt(clip / form)) if form > 0 else 1.0


def total_kl(
    blocks: Sequence[Block],
    means: Mapping[str, Tensor],
    prior: BlockPrior,
    scale: float,
    moved: Sequence[tuple[Change, float | Tensor]] | None = None,
) -> float:
    """KL(q ‖ p) in nats; with `moved`, as it will be after these changes, their steps times the second."""
    total = 0.0
    for index, block in ((i, b) for i, b in enumerate(blocks) if b.is_random):
        offset, inverse = prior.offset(block, means), None
        if moved is not None:
            change, rate = moved[index]
            offset, inverse = offset - rate * change.step, change.inverse
        total += block.kl(offset, prior.precision(block), scale, inverse or block.current(block.inverses))
    return total
