"""Fit maps of class probabilities on held-out rows, each with a prior that weighs as much as a few rows.

With a prior of κ rows, the negative log-likelihood of all rows plus the following is minimised, which is convex.

    temperature, W = w·I          ½κ (w − 1)²
    vector, W = diag w            ½κ ((w̄ − 1)² + Σ (wₖ − w̄)² + Σ bₖ²)
    Dirichlet (Kull et al. 2019)  the same of W's diagonal, and ½κ·classes·Σ Wⱼₖ² of the rest
    beta                          ½κ ((a − 1)² + (b − 1)² + c²) for each class
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from credo.calibration.minimise import lbfgs
from credo.core.held_out.class_maps import BetaMap, ClassMap, IsotonicMap, LinearMap, log_complements
from credo.evaluate.calibration import temperature_scale

# κ, as for the two numbers of `calibrate`.
PRIOR = 4.0
_NEWTON_STEPS = 60


def fit_temperature(log_probs: Tensor, labels: Tensor, prior: float = PRIOR) -> LinearMap:
    """Temperature scaling (Guo et al. 2017); with `prior=0` that of `credo.evaluate.temperature_scale`.

    Args:
        log_probs: Finite log-probabilities [rows, classes], float64.
        labels: Class indices [rows].
        prior: κ.
    """
    none = log_probs.new_zeros(())
    if prior == 0:
        return LinearMap(none + 1 / temperature_scale(log_probs, labels).temperature, none)

    def cost(parts: list[Tensor]) -> Tensor:
        return _nll(log_probs * parts[0], labels) + 0.5 * prior * (parts[0] - 1).square()

    return LinearMap(lbfgs(cost, [none + 1])[0], none)


def fit_vector(log_probs: Tensor, labels: Tensor, prior: float = PRIOR) -> LinearMap:
    """A factor and a bias for each class (vector scaling, Guo et al. 2017).

    Args:
        log_probs: Finite log-probabilities [rows, classes], float64.
        labels: Class indices [rows].
        prior: κ.
    """

    def cost(parts: list[Tensor]) -> Tensor:
        return _nll(log_probs * parts[0] + parts[1], labels) + _prior(parts[0], parts[1], prior)

    ones = log_probs.new_ones(log_probs.shape[1])
    return LinearMap(*lbfgs(cost, [ones, torch.zeros_like(ones)]))


def fit_dirichlet(log_probs: Tensor, labels: Tensor, prior: float = PRIOR) -> LinearMap:
    """Dirichlet calibration (Kull et al. 2019) with regularised off-diagonal entries and bias.

    Args:
        log_probs: Finite log-probabilities [rows, classes], float64.
        labels: Class indices [rows].
        prior: κ.
    """
    classes = log_probs.shape[1]

    def cost(parts: list[Tensor]) -> Tensor:
        weight, diagonal = parts[0], parts[0].diagonal()
        beside = weight.square().sum() - diagonal.square().sum()
        nll = _nll(log_probs @ weight.T + parts[1], labels)
        return nll + _prior(diagonal, parts[1], prior) + 0.5 * prior * classes * beside

    return LinearMap(*lbfgs(cost, [torch.eye(classes, dtype=torch.float64), log_probs.new_zeros(classes)]))


def fit_isotonic(log_probs: Tensor, labels: Tensor, prior: float = PRIOR) -> IsotonicMap:
    """Isotonic regression of each class against the rest (Zadrozny & Elkan 2002).

    The part ε = 1/(rows + 1) of the map is the identity, which keeps every NLL finite.

    Args:
        log_probs: Finite log-probabilities [rows, classes], float64.
        labels: Class indices [rows].
        prior: Not used: the curves have no parameters to pull towards the identity.
    """
    probs, hits = log_probs.exp(), _one_hot(labels, log_probs.shape[1])
    curves = [isotonic(x, y) for x, y in zip(probs.T, hits.T, strict=True)]
    most = max(len(knots) for knots, _ in curves)
    inputs, outputs = (torch.stack([padded(curve[side], most) for curve in curves]) for side in (0, 1))
    return IsotonicMap(inputs, outputs, torch.tensor(1 / (len(labels) + 1), dtype=torch.float64))


def fit_beta(log_probs: Tensor, labels: Tensor, prior: float = PRIOR) -> BetaMap:
    """Beta calibration of each class against the rest (Kull, Silva Filho & Flach 2017).

    The cost is convex, so its minimum with a, b ≥ 0 is the best of the minima with a, b or both held at 0 that are
    feasible.

    Args:
        log_probs: Finite log-probabilities [rows, classes], float64.
        labels: Class indices [rows].
        prior: κ.
    """
    features = torch.stack([log_probs, -log_complements(log_probs), torch.ones_like(log_probs)], -1).transpose(0, 1)
    hits = _one_hot(labels, log_probs.shape[1]).T
    best, lowest = features.new_zeros(len(features), 3), features.new_full((len(features),), torch.inf)
    for free in ([1, 1, 1], [1, 0, 1], [0, 1, 1], [0, 0, 1]):
        found, costs = _logistic(features, hits, features.new_tensor(free), prior)
        costs = torch.where((found[:, :2] < 0).any(1), torch.inf, costs)
        best, lowest = torch.where((costs < lowest)[:, None], found, best), torch.minimum(costs, lowest)
    return BetaMap(best)


CLASS_FITS: dict[str, Callable[[Tensor, Tensor, float], ClassMap]] = {
    "temperature": fit_temperature,
    "vector": fit_vector,
    "dirichlet": fit_dirichlet,
    "isotonic": fit_isotonic,
    "beta": fit_beta,
}


def isotonic(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Knots and values of the rising curve with the least squared error, by pooling adjacent violators.

    Args:
        x: Inputs [rows].
        y: Targets [rows].
    """
    places, index = x.unique(sorted=True, return_inverse=True)
    weights = torch.bincount(index, minlength=len(places)).double()
    sums = torch.bincount(index, weights=y.double(), minlength=len(places))
    blocks: list[list[float]] = []  # sum, weight, first and last place
    for place, (total, weight) in enumerate(zip(sums.tolist(), weights.tolist(), strict=True)):
        blocks.append([total, weight, place, place])
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] >= blocks[-1][0] * blocks[-2][1]:
            above = blocks.pop()
            blocks[-1] = [blocks[-1][0] + above[0], blocks[-1][1] + above[1], blocks[-1][2], above[3]]
    ends = [(int(end), total / weight) for total, weight, *both in blocks for end in sorted(set(both))]
    return places[[place for place, _ in ends]], x.new_tensor([value for _, value in ends])


def _nll(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def _prior(factors: Tensor, bias: Tensor, prior: float) -> Tensor:
    mean = factors.mean()
    return 0.5 * prior * ((mean - 1).square() + (factors - mean).square().sum() + bias.square().sum())


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    return torch.nn.functional.one_hot(labels, classes).double()


def padded(values: Tensor, size: int) -> Tensor:
    """The last value repeated up to this size.

    Args:
        values: At least one, [values].
        size: How many there shall be.
    """
    return torch.cat([values, values[-1:].expand(size - len(values))])


def _logistic(features: Tensor, hits: Tensor, free: Tensor, prior: float) -> tuple[Tensor, Tensor]:
    """Coefficients [classes, 3] of a logistic regression for each class, and its cost, by Newton's method.

    Args:
        features: [classes, rows, 3].
        hits: 1 or 0, [classes, rows].
        free: 0 for coefficients that stay 0.
        prior: κ, towards (1, 1, 0).
    """
    towards = features.new_tensor([1.0, 1.0, 0.0])

    def costs(at: Tensor) -> Tensor:
        odds = (features @ at.unsqueeze(-1)).squeeze(-1)
        nll = torch.nn.functional.softplus(odds) - hits * odds
        return nll.sum(1) + 0.5 * prior * (at - towards).square().sum(1)

    at = (towards * free).expand(len(features), 3)
    cost = costs(at)
    for _ in range(_NEWTON_STEPS):
        probs = (features @ at.unsqueeze(-1)).squeeze(-1).sigmoid()
        gradient = ((probs - hits).unsqueeze(1) @ features).squeeze(1) + prior * (at - towards)
        curvature = (features.transpose(1, 2) * (probs * (1 - probs)).unsqueeze(1)) @ features
        curvature = curvature * free * free[:, None] + torch.diag(prior * free + (1 - free) + 1e-12)
        step = torch.linalg.solve(curvature, gradient * free)
        if float((step * gradient).sum(1).max()) < 1e-18 * len(hits[0]):
            break
        at, cost = _shorter(costs, at, cost, step)
    return at, cost


def _shorter(costs: Callable[[Tensor], Tensor], at: Tensor, cost: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Step against the gradient, for each class halved until the cost does not rise."""
    for _ in range(40):
        new = costs(at - step)
        worse = new > cost
        if not bool(worse.any()):
            return at - step, new
        step = torch.where(worse[:, None], step / 2, step)
    return at, cost
