"""Validation of K-FAC: steps that are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from credo.core.errors import NonFiniteError
from credo.methods.kfac.blocks import Block


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
