"""Validation of K-FAC: gradients, curvatures and steps that are not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from credo.core.errors import NonFiniteError
from credo.core.kronecker.factors import diagonal
from credo.methods.kfac.blocks import Block, LayerBlock
from credo.methods.natural.validate import check_finite


def check_gathered(
    blocks: Sequence[Block], gradients: Mapping[str, Tensor], curvatures: Mapping[str, Tensor], at: int
) -> None:
    """Raise NonFiniteError if what was gathered is not finite.

    Args:
        blocks: The blocks.
        gradients: Gradients by parameter name.
        curvatures: Curvatures by the blocks' keys.
        at: The step.
    """
    # Sums of r rᵀ: a row that is not finite shows on the diagonal, and no entry is larger than those.
    factors = {key for block in blocks if isinstance(block, LayerBlock) for key in block.keys[:2]}
    seen = [diagonal(tensor) if key in factors else tensor for key, tensor in curvatures.items()]
    sums = [tensor.sum(dtype=torch.float64) for tensor in (*gradients.values(), *seen)]
    check_finite(float(torch.stack(sums).sum()), (gradients, curvatures), at)


def check_steps(blocks: Sequence[Block], steps: Sequence[Tensor], at: int) -> None:
    """Raise NonFiniteError for a step that is not finite, with the names of its parameters.

    Args:
        blocks: The blocks.
        steps: The preconditioned momentum of each.
        at: The step.
    """
    for block, step in zip(blocks, steps, strict=True):
        if not bool(torch.isfinite(step).all()):
            raise NonFiniteError(
                f"The step of {' and '.join(block.names)} is not finite at step {at}; parameters are still those "
                "before it. Try more damping."
            )
