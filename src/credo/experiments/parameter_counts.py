"""How many numbers a posterior is made of."""

from __future__ import annotations

from credo.core.posterior import GaussianPosterior, Posterior
from credo.methods import BBB, NodeBNN, NoisyKFAC


def parameter_counts(posterior: Posterior) -> dict[str, int]:
    """Numbers of one network, of all that gradients train, and of all that predictions need."""
    return {
        "network": sum(p.numel() for p in posterior.model.parameters()),
        "trained": sum(p.numel() for p in posterior.parameters() if p.requires_grad),
        "needed": numbers_needed(posterior),
    }


def numbers_needed(posterior: Posterior) -> int:
    """Numbers that a prediction needs: weights, noise of the targets, and what describes the spread of random weights.

    That is a deviation for each weight of a Gaussian (one for each tensor, if its weights share it), two roots of each
    layer of noisy K-FAC, moments of the nodes of a node-based network, all members of an ensemble. Pruned weights do
    not count, nor does state that only training needs (momentum, curvature of OGN and K-FAC).
    """
    return sum(_point(part) + _spread(part) for part in posterior.parts)


def node_numbers(posterior: Posterior) -> int:
    """Means and deviations of node variables, of all components; 0 where there are none."""
    parts = [part for part in posterior.parts if isinstance(part, NodeBNN)]
    return sum(part.loc.numel() + part.rho.numel() for part in parts)


def _point(part: Posterior) -> int:
    kept = sum(int(mask.sum()) for mask in part.masks().values())
    return kept + sum(p.numel() for p in part.likelihood.parameters())


def _spread(part: Posterior) -> int:
    if isinstance(part, BBB) and not part.spread.per_weight:
        return part.rho.numel()
    if isinstance(part, NodeBNN):
        return node_numbers(part)
    if isinstance(part, GaussianPosterior):
        masks = part.masks()
        return sum(int(masks[name].sum()) for name in part.std())
    if not isinstance(part, NoisyKFAC):
        return 0
    blocks = [block for block in part.blocks if block.is_random]
    return sum(b.numel() for block in blocks for name, b in block.named_buffers() if name.endswith("root"))
