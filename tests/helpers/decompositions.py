"""Decompositions of uncertainty straight from the papers' formulas, for probabilities [draws, batch, classes]."""

from __future__ import annotations

import torch
from torch import Tensor

from credo.predict import Uncertainty


def entropy(probs: Tensor) -> Tensor:
    """−Σ p log p over the last dimension, 0·log 0 = 0."""
    each: Tensor = torch.special.entr(probs)
    return each.sum(-1)


def entropy_decomposition(probs: Tensor) -> Uncertainty:
    """Total H[p̄], aleatoric mean H[p_s], epistemic their difference: the mutual information of label and weights."""
    total, aleatoric = entropy(probs.mean(0)), entropy(probs).mean(0)
    return Uncertainty(total, aleatoric, (total - aleatoric).clamp_min(0))


def covariance_matrices(probs: Tensor) -> tuple[Tensor, Tensor]:
    """diag(p̄) − mean p_s p_sᵀ and mean (p_s−p̄)(p_s−p̄)ᵀ, each [batch, classes, classes] (Kwon et al. 2018)."""
    mean = probs.mean(0)
    second = torch.einsum("sbi,sbj->bij", probs, probs) / len(probs)
    deviations = probs - mean
    return torch.diag_embed(mean) - second, torch.einsum("sbi,sbj->bij", deviations, deviations) / len(probs)


def covariance_decomposition(probs: Tensor) -> Uncertainty:
    """Traces of these matrices: Σ p̄(1−p̄) = Σ mean p_s(1−p_s) + Σ var p_s."""
    aleatoric, epistemic = (matrix.diagonal(dim1=-2, dim2=-1).sum(-1) for matrix in covariance_matrices(probs))
    return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)


def entropy_deviation_decomposition(probs: Tensor) -> Uncertainty:
    """Aleatoric Ha = mean H[p_s], epistemic mean |H[p_s] − Ha|, total their sum (Zhang et al. 2022)."""
    each = entropy(probs)
    aleatoric = each.mean(0)
    epistemic = (each - aleatoric).abs().mean(0)
    return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)
