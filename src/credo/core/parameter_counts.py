"""How many numbers a posterior consists of."""

from __future__ import annotations

from credo.core.posterior import Posterior


def parameter_counts(posterior: Posterior) -> dict[str, int]:
    """Parameters of one network, of all that gradients train, and of all that predictions need."""
    return {
        "network": sum(p.numel() for p in posterior.model.parameters()),
        "trained": sum(p.numel() for p in posterior.parameters() if p.requires_grad),
        "needed": parameter_count(posterior),
    }


def parameter_count(posterior: Posterior) -> int:
    """Parameters that a prediction needs, of all members of an ensemble.

    These are the weights that are not pruned, the observation noise, and `Description.spread_count`. State that only
    training needs (momentum, the curvature of OGN and K-FAC) does not count.
    """
    return sum(_weight_count(part) + part.describe().spread_count for part in posterior.parts)


def _weight_count(part: Posterior) -> int:
    unpruned = sum(int(mask.sum()) for mask in part.masks().values())
    return unpruned + sum(p.numel() for p in part.likelihood.parameters())
