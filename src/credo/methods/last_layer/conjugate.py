"""Bayesian linear regression on features, for several outputs with noises of their own; all in float64.

Output k is y_k = φᵀw_k + noise of variance v_k, with the prior w_k ~ N(m_k, (α·diag(p_k))⁻¹). With G = ΦᵀΦ and
b_k = Φᵀy_k over the data, the posterior precision is G/v_k + α·diag(p_k). One eigendecomposition of G, scaled by the
prior, makes it diagonal for every noise and every α, so that the evidence of these costs next to nothing (MacKay 1992).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Where data say nothing of a weight's size, the evidence has no maximum.
LOWEST, HIGHEST = 1e-8, 1e8
_MOST_ROUNDS = 2000


@dataclass(frozen=True)
class LinearData:
    """Sums over examples; all that the posterior depends on.

    Attributes:
        gram: G = ΦᵀΦ, [features, features].
        cross: ΦᵀY, [features, outputs].
        squares: Σ y², [outputs].
        rows: Number of examples, [].
    """

    gram: Tensor
    cross: Tensor
    squares: Tensor
    rows: Tensor

    @staticmethod
    def of(features: Tensor, targets: Tensor) -> LinearData:
        """The sums of some examples.

        Args:
            features: [examples, features].
            targets: [examples, outputs].
        """
        rows = torch.tensor(float(len(features)), dtype=features.dtype, device=features.device)
        return LinearData(features.T @ features, features.T @ targets, targets.square().sum(0), rows)

    def __add__(self, other: LinearData) -> LinearData:
        return LinearData(
            self.gram + other.gram, self.cross + other.cross, self.squares + other.squares, self.rows + other.rows
        )


@dataclass(frozen=True)
class LayerPrior:
    """w ~ N(mean, 1/(α·precision)) for each weight, [features, outputs] both; α is given where it is used."""

    mean: Tensor
    precision: Tensor

    @property
    def is_shared(self) -> bool:
        """Whether all outputs have the same precisions."""
        return bool((self.precision == self.precision[:, :1]).all())


class Regression:
    """The posterior and the evidence of a data set as functions of noise and prior precision.

    Args:
        data: Sums over the examples.
        prior: Prior of the weights.
    """

    def __init__(self, data: LinearData, prior: LayerPrior) -> None:
        self.rows, self.prior = data.rows, prior
        precision = prior.precision[:, :1] if prior.is_shared else prior.precision
        scale = precision.T.rsqrt()  # [outputs or 1, features]
        eigenvalues, vectors = torch.linalg.eigh(scale.unsqueeze(-1) * data.gram * scale.unsqueeze(-2))
        self.eigenvalues = eigenvalues.clamp_min(0.0)
        self.basis = scale.unsqueeze(-1) * vectors
        offset = data.gram @ prior.mean
        self.cross = rotated((data.cross - offset).T, self.basis)  # [outputs, features]
        self.squares = data.squares - (prior.mean * (2 * data.cross - offset)).sum(0)  # of y − Φm

    def mean(self, variance: Tensor, alpha: Tensor) -> Tensor:
        """Means of the posterior, [features, outputs].

        Args:
            variance: Of the noise of each output, [outputs].
            alpha: Factor of the prior's precisions.
        """
        return self.prior.mean + rotated(self.cross / self._total(variance, alpha), self.basis.mT).T

    def variances(self, variance: Tensor, alpha: Tensor) -> Tensor:
        """Variances of the posterior in `basis`, [outputs, features], with the arguments of `mean`."""
        return variance.unsqueeze(-1) / self._total(variance, alpha)

    def log_evidence(self, variance: Tensor, alpha: Tensor) -> Tensor:
        """log p(y_k | v, α) of each output, exact, in nats, with the arguments of `mean`."""
        total = self._total(variance, alpha)
        misfit = (self.squares - (self.cross.square() / total).sum(-1)) / variance
        determinant = (total.log() - (alpha * variance).log().unsqueeze(-1)).sum(-1)
        return -0.5 * (self.rows * (2 * math.pi * variance).log() + determinant + misfit)

    def maximum(
        self, variance: Tensor, alpha: Tensor, *, noise: str | None, prior: bool, least: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Noise variances and α that maximise the evidence, by MacKay's fixed point.

        Args:
            variance: To start from, or to keep, [outputs].
            alpha: To start from, or to keep.
            noise: `"one"` noise for all outputs, one for `"each"`, or None: the noise is kept.
            prior: Whether to choose α.
            least: Lower bound of the variances.
        """
        for _ in range(_MOST_ROUNDS):
            before = torch.cat([variance, alpha.view(1)]).log()
            total = self._total(variance, alpha)
            mean = self.cross / total
            known = (self.eigenvalues / total).sum(-1)  # effective number of weights that the data determine
            if prior:
                alpha = (known.sum() / mean.square().sum()).nan_to_num(nan=HIGHEST).clamp(LOWEST, HIGHEST)
            if noise is not None:
                misfit = self.squares - ((2 * self.cross - self.eigenvalues * mean) * mean).sum(-1)
                free = self.rows - known
                found = misfit / free if noise == "each" else (misfit.sum() / free.sum()).expand_as(misfit)
                variance = found.clamp_min(least)
            if bool(((torch.cat([variance, alpha.view(1)]).log() - before).abs() < 1e-9).all()):
                break
        return variance, alpha

    def _total(self, variance: Tensor, alpha: Tensor) -> Tensor:
        """λ + αv, [outputs, features]: the posterior's precision in the basis, times v."""
        total: Tensor = self.eigenvalues + (alpha * variance).unsqueeze(-1)
        return total


def rotated(rows: Tensor, basis: Tensor) -> Tensor:
    """Each output's vector times its basis, [outputs, features].

    Args:
        rows: A vector for each output, [outputs, features].
        basis: [outputs or 1, features, features].
    """
    return rows @ basis[0] if len(basis) == 1 else torch.einsum("kd,kdj->kj", rows, basis)
