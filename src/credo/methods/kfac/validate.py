"""Validation of K-FAC: steps that are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from credo.core.errors import NonFiniteError
from credo.methods.kfac.blocks import Block, Change


def check_steps(blocks: Sequence[Block], changes: Sequence[Change], at: int) -> None:
    """Raise NonFiniteError for a step that is not finite, with the names of its parameters.

    Args:
        blocks: The blocks.
        changes: What the update does to each.
        at: The step.
    """
    for block, change in zip(blocks, changes, strict=True):
        if not bool(torch.isfinite(change.step).all()):
            raise NonFiniteError(
                f"The step of {' and '.join(block.names)} is not finite at step {at}; parameters are still those "
                "before it. Try more damping."
            )
