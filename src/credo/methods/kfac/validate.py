"""Validation of K-FAC: constructor arguments, and steps that are not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from credo.core.errors import NonFiniteError, unknown
from credo.core.likelihood import Likelihood
from credo.core.support.validate import checked_count
from credo.methods.kfac.blocks import Block, Change
from credo.methods.kfac.sampled_fisher import check_can_sample
from credo.methods.natural.validate import check_augmentation, check_numbers, check_warmup

FISHERS = ("empirical", "sampled")


def check_options(options: Mapping[str, Any], likelihood: Likelihood) -> None:
    """Raise ValueError for impossible constructor arguments."""
    check_numbers(
        momentum=options["momentum"],
        decay=options["curvature_decay"],
        damping=options["damping"],
        draws=options.get("draws", 1),
        temperature=options["temperature"],
    )
    if options["clip"] is not None and not options["clip"] > 0:
        raise ValueError(f"clip={options['clip']} must be positive, or None for no clipping.")
    for name in ("factor_every", "inverse_every"):
        checked_count(name, options[name], what="steps")
    check_augmentation(options["augmentation"])
    check_warmup(options.get("temperature_start"), options.get("warmup_steps", 0))
    if options["fisher"] not in FISHERS:
        raise ValueError(unknown("fisher", str(options["fisher"]), FISHERS))
    if options["fisher"] == "sampled":
        check_can_sample(likelihood)


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
