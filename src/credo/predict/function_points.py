"""Averages over Gaussian logits for what no link gives, by a few fixed points instead of draws.

The points are pairs ±z along orthogonal directions, whose lengths have the quantiles of a standard normal vector's and
its mean square. So linear functions are averaged exactly, and 20 points of ten classes come closer than 32 draws (in
`tests/predict/test_function_points.py`); every input has the same ones, and predictions have no random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor

from credo.predict.linear import covariance_root
from credo.predict.result import ClassPrediction

# Rows at once: what they need stays in the processor's cache.
_ROWS = 512


def point_count(size: int, draws: int) -> int:
    """How many points for `size` logits: 16 to 32, and no more than `draws` but for an even number."""
    return 2 * math.ceil(min(draws, max(16, 2 * size), 32) / 2)


@cache
def standard_points(size: int, count: int) -> Tensor:
    """Points [size, count] for a standard normal vector, in float64.

    Args:
        size: Of the vector.
        count: An even number of points.
    """
    generator = torch.Generator().manual_seed(0)
    pairs = count // 2
    blocks = -(-pairs // size)
    normal = torch.randn(blocks, size, size, generator=generator, dtype=torch.double)
    directions = torch.linalg.qr(normal)[0].mT.reshape(-1, size)[:pairs]
    lengths = torch.randn(4096, size, generator=generator, dtype=torch.double).norm(dim=1)
    levels = (torch.arange(pairs, dtype=torch.double) + 0.5) / pairs
    length = lengths.quantile(levels)[torch.randperm(pairs, generator=generator)]
    length *= math.sqrt(size / float(length.square().mean()))
    half = (directions * length.unsqueeze(1)).T
    return torch.cat([half, -half], 1)


def entropies_and_variances(mean: Tensor, covariance: Tensor, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entropies [rows, points] of softmax(f), and means and variances [rows, classes] of its probabilities.

    Args:
        mean: Means of the logits, [rows, classes].
        covariance: Their covariance, [rows, classes, classes].
        points: `standard_points` for so many logits.
    """
    pairs = zip(mean.split(_ROWS), covariance.split(_ROWS), strict=True)
    parts = [averages_at(own, covariance_root(each), points) for own, each in pairs]
    entropy, average, variance = (torch.cat(each) for each in zip(*parts, strict=True))
    return entropy, average, variance


def averages_at(mean: Tensor, root: Tensor, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`entropies_and_variances` of a few rows, from a root of their covariance.

    Args:
        mean: Means of the logits, [rows, classes].
        root: A with A·Aᵀ their covariance, [rows, classes, classes].
        points: `standard_points` for so many logits.
    """
    rows, classes = mean.shape
    # [points, classes, rows]: with the rows last, sums over classes and points add up long runs of memory.
    noise = points.to(mean).T @ root.to(mean).permute(2, 1, 0).reshape(classes, -1)
    log_probs = noise.view(-1, classes, rows).add_(mean.T).log_softmax(1)
    probs = log_probs.exp()
    # Bounded below, since 0·(−∞) is no number.
    entropy = log_probs.clamp_min_(-1e3).mul_(probs).sum(1).neg_().T
    average = probs.mean(0)
    variance = probs.sub_(average).square_().mean(0).T
    average = average.T
    return entropy, average, variance


@dataclass(frozen=True)
class Functions:
    """What single functions of the posterior say about each row, in float64.

    Attributes:
        entropy: Mean of their entropies, [rows].
        deviation: Mean absolute deviation from it, [rows].
        spread: Variances of their probabilities, [rows, classes].
        count: How many there are, [rows].
    """

    entropy: Tensor
    deviation: Tensor
    spread: Tensor
    count: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Functions]) -> Functions:
        """The rows of all."""
        return cls(*(torch.cat([getattr(each, field.name) for each in parts]) for field in fields(cls)))

    def prediction(self, log_probs: Tensor, labels: Tensor | None, dtype: torch.dtype) -> ClassPrediction:
        """The prediction with a link's log probabilities [rows, classes], for labels if there are any."""
        chosen = None if labels is None else log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        probs = log_probs.exp()
        total, variance = torch.special.entr(probs).sum(-1), probs * (1 - probs)
        aleatoric, spread = torch.minimum(self.entropy, total), torch.minimum(self.spread, variance)
        return ClassPrediction(
            draws_used=self.count,
            targets=labels,
            log_likelihood=None if chosen is None else chosen.to(dtype),
            probs=probs.to(dtype),
            mean_entropy=aleatoric.to(dtype),
            mutual_information=(total - aleatoric).to(dtype),
            entropy_deviation=self.deviation.to(dtype),
            aleatoric_by_class=(variance - spread).to(dtype),
            epistemic_by_class=spread.to(dtype),
            mc_error=torch.zeros(len(probs), dtype=dtype),
        )
