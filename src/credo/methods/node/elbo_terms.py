"""KL terms of node-based posteriors, mixtures q = 1/K Σ_k N(μ_k, σ_k²), in nats.

`mean` and `std` are [components, nodes], independent over the nodes; sums over nodes, means over components.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from credo.core.prior import HALF_LOG_2PI

KINDS = ("bound", "layer-bound", "mean", "full")
Spans = Sequence[slice]


def bhattacharyya(mean: Tensor, std: Tensor) -> Tensor:
    """Bhattacharyya distances between all pairs of components, [components, components].

    Σ_j Δμ²/(4(σ_k²+σ_r²)) + ½ log((σ_k²+σ_r²)/(2σ_kσ_r)); exp(−D) is the overlap ∫√(q_k q_r).
    """
    count = len(mean)
    first, second = torch.triu_indices(count, count, offset=1, device=mean.device)
    total = std[first].square() + std[second].square()
    apart = (mean[first] - mean[second]).square() / (4 * total)
    shape = 0.5 * (total / (2 * std[first] * std[second])).log()
    distance = (apart + shape).sum(1)
    matrix = mean.new_zeros(count, count).index_put((first, second), distance)
    return matrix + matrix.T


def entropy_bound(mean: Tensor, std: Tensor) -> Tensor:
    """Lower bound on the mixture's entropy (Kolchinsky and Tracey 2017); exact for one component.

    1/K Σ_k H[q_k] − 1/K Σ_k log(1/K Σ_r exp(−D_B(q_k, q_r))), between the mean entropy and log K above it.
    """
    count = len(mean)
    own = std.log().sum(1).mean() + mean.shape[1] * (HALF_LOG_2PI + 0.5)
    if count == 1:
        return own
    return own - (torch.logsumexp(-bhattacharyya(mean, std), 1) - math.log(count)).mean()


def cross_entropy(mean: Tensor, std: Tensor, prior_std: float) -> Tensor:
    """−E_q log N(z; 1, `prior_std`²) for the mixture with these `mean` and `std`."""
    squares = ((mean - 1).square() + std.square()).sum(1).mean()
    return squares / (2 * prior_std**2) + mean.shape[1] * (HALF_LOG_2PI + math.log(prior_std))


def bound_terms(mean: Tensor, std: Tensor, prior_std: float, gamma: float, spans: Spans) -> tuple[Tensor, Tensor]:
    """Cross-entropy − (1+γ)·entropy bound, which is minimised, and the same with γ = 0, the bound on the KL.

    Args:
        mean: Means, [components, nodes].
        std: Standard deviations, [components, nodes].
        prior_std: Standard deviation of the prior N(1, prior_std²).
        gamma: γ.
        spans: Nodes whose entropies are bounded separately and added. One span of all nodes gives the joint bound.
            Several give no bound, since they share the component: each counts a gain of log K that exists once.
    """
    entropy = torch.stack([entropy_bound(mean[:, span], std[:, span]) for span in spans]).sum()
    kl = cross_entropy(mean, std, prior_std) - entropy
    return kl - gamma * entropy, kl


def add_bound_gradients_(
    mean: Tensor, std: Tensor, prior_std: float, gamma: float, weight: float, by_mean: Tensor, by_std: Tensor
) -> Callable[[], tuple[float, float]]:
    """Add `weight` times the gradients of `bound_terms` of all nodes, in a quarter of autograd's operators.

    Returns a function that gives the two terms; on an accelerator it waits for them.

    Args:
        mean: Means, [components, nodes].
        std: Standard deviations, [components, nodes].
        prior_std: Standard deviation of the prior N(1, prior_std²).
        gamma: γ.
        weight: Factor of the gradients.
        by_mean: Takes the gradient of the means.
        by_std: Takes that of the standard deviations.
    """
    count, nodes = mean.shape
    variance, offset = std.square(), mean - 1
    half = torch.lerp(variance.unsqueeze(1), variance.unsqueeze(0), 0.5)  # (σ_k² + σ_r²)/2, [components, components, …]
    apart = mean.unsqueeze(1) - mean.unsqueeze(0)
    ratio = apart / half
    distances = (half / (std.unsqueeze(1) * std.unsqueeze(0))).log_().addcmul_(apart, ratio, value=0.25).sum(2)
    chosen = distances.mul_(-0.5).softmax(1)  # overlaps exp(−D), over their sum; that of a component with itself is 1
    logs, norms = std.log().sum(), torch._foreach_norm([offset, std])

    pairs = (chosen + chosen.T).unsqueeze(1)
    toward, away = weight / (count * prior_std**2), -weight * (1 + gamma) / (2 * count)
    by_mean.add_(offset, alpha=toward).unsqueeze(1).baddbmm_(pairs, ratio, alpha=away / 2)
    # Σ_r pairs_kr·(1/half − ratio²/4) + (2 − Σ_r pairs_kr)/σ_k², where 1/σ_k² is the first bracket at r = k.
    bracket = half.reciprocal_().addcmul_(ratio, ratio, value=-0.25)
    own = bracket.diagonal().T.unsqueeze(1)
    spread = torch.baddbmm(own, pairs, bracket - own, beta=2).squeeze(1)
    by_std.addcmul_(std, spread, value=away).add_(std, alpha=toward)

    @cache
    def values() -> tuple[float, float]:
        constant = nodes * (HALF_LOG_2PI + math.log(prior_std))
        cross = sum(norm.item() ** 2 for norm in norms) / count / (2 * prior_std**2) + constant
        overlaps = -sum(map(math.log, chosen.diagonal().tolist()))  # Σ_k log Σ_r exp(−D_kr)
        entropy = (logs.item() - overlaps) / count + (nodes * (HALF_LOG_2PI + 0.5) + math.log(count))
        kl = cross - entropy
        return kl - entropy * gamma, kl

    return values


def mean_terms(mean: Tensor, std: Tensor, prior_std: float, gamma: float, spans: Spans) -> tuple[Tensor, Tensor]:
    """The KL of the average of K independent draws, one of each component (Trinh et al. 2020); not a bound.

    It does not penalise components that are far apart as long as their average is near 1. It is smallest where the
    average has the prior's deviation, so each component √K times that: long training ends there.

    `mean`, `std` and `prior_std` are as in `bound_terms`; `gamma` and `spans` are not used.
    """
    kl = _gaussian_kl(mean.mean(0), std.square().sum(0).sqrt() / len(mean), prior_std)
    return kl, kl


def full_terms(mean: Tensor, std: Tensor, prior_std: float, gamma: float, spans: Spans) -> tuple[Tensor, Tensor]:
    """Σ_k KL(q_k ‖ p): the KL of K separate networks, at least K times the mixture's.

    `mean`, `std` and `prior_std` are as in `bound_terms`; `gamma` and `spans` are not used.
    """
    kl = _gaussian_kl(mean, std, prior_std)
    return kl, kl


def _gaussian_kl(mean: Tensor, std: Tensor, prior_std: float) -> Tensor:
    quadratic = ((mean - 1).square() + std.square()).sum() / (2 * prior_std**2)
    return quadratic - std.log().sum() + mean.numel() * (math.log(prior_std) - 0.5)


TERMS: dict[str, Callable[[Tensor, Tensor, float, float, Spans], tuple[Tensor, Tensor]]] = {
    "bound": bound_terms,
    "layer-bound": bound_terms,
    "mean": mean_terms,
    "full": full_terms,
}
