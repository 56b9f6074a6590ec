"""Mean, variances and the last deviations of vectors that arrive one by one."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class RunningMoments(nn.Module):
    """Moments of the vectors θ₁ … θₙ, without a copy of them.

    With dᵢ = √((i−1)/i)·(θᵢ − θ̄ᵢ₋₁), where θ̄ᵢ is the mean of the first i, the sum of all dᵢdᵢᵀ / (n−1) is the sample
    covariance (Welford 1962). Its diagonal is kept, and the last dᵢ in a ring buffer.

    Args:
        size: Length of the vectors.
        random: How many of their first entries have a covariance.
        rank: Number of deviations dᵢ that are kept.
        **options: Dtype and device.
    """

    nonnegative: ClassVar[tuple[str, ...]] = ("squares", "collected")
    mean: Tensor
    squares: Tensor
    deviations: Tensor
    collected: Tensor

    def __init__(self, size: int, *, random: int, rank: int, **options: Any) -> None:
        super().__init__()
        self.random, self.rank = random, rank
        self.register_buffer("mean", torch.zeros(size, **options))
        self.register_buffer("squares", torch.zeros(random, **options))
        self.register_buffer("deviations", torch.zeros(rank, random, **options))
        self.register_buffer("collected", torch.zeros((), dtype=torch.long))

    @property
    def count(self) -> int:
        """The number n of vectors."""
        return int(self.collected)

    def forget_(self) -> None:
        """Start again without any vector."""
        self.collected.zero_()

    @torch.no_grad()
    def add_(self, vector: Tensor) -> None:
        """Add a vector."""
        count = self.count + 1
        if count == 1:
            self.mean.copy_(vector)
            self.squares.zero_()
        else:
            deviation = vector - self.mean
            self.mean.add_(deviation, alpha=1 / count)
            deviation = deviation[: self.random].mul_(math.sqrt((count - 1) / count))
            self.squares.addcmul_(deviation, deviation)
            if self.rank:
                self.deviations[(count - 2) % self.rank] = deviation
        self.collected.fill_(count)

    def variances(self) -> Tensor:
        """Variances of a draw's entries: σ², or its average with those of the low-rank part; zeros for n < 2."""
        kept, variances = self._kept(), self._diagonal()
        return variances if kept is None else (variances + kept.square().mean(0)) / 2

    def noise(self, generator: torch.Generator) -> Tensor:
        """σ⊙z₁ without a low-rank part, otherwise (σ⊙z₁ + D z₂/√k)/√2 with the k deviations kept as columns of D.

        Args:
            generator: Gives z₁ and z₂, standard normal; it may be on another device.
        """
        kept = self._kept()
        rows = 0 if kept is None else len(kept)
        normal = torch.randn(self.random + rows, generator=generator, device=generator.device, dtype=self.mean.dtype)
        normal = normal.to(self.mean.device)
        noise = self._diagonal().sqrt_().mul_(normal[: self.random])
        if kept is None:
            return noise
        return noise.addmv_(kept.T, normal[self.random :], alpha=rows**-0.5).mul_(math.sqrt(0.5))

    def _diagonal(self) -> Tensor:
        """σ²."""
        return self.squares / max(self.count - 1, 1)

    def _kept(self) -> Tensor | None:
        """The last deviations [k, random], k = min(rank, n − 1); None if there are none."""
        rows = min(self.rank, self.count - 1)
        return self.deviations[:rows] if rows > 0 else None
