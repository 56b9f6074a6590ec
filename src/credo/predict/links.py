"""Class probabilities of Gaussian logits without draws: approximations of E[softmax(f)] for f ~ N(mean, covariance).

All give log probabilities [..., classes]. Adding one number to all logits of an input changes no probability: the
probit approximation neglects that, the other two do not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# σ(z) ≈ Φ(√λ⁻¹·z) with the same derivative at 0, so that E[σ(z)] ≈ σ(m/√(1 + λv)) for z ~ N(m, v).
_LAMBDA = math.pi / 8


def probit(mean: Tensor, variance: Tensor) -> Tensor:
    """softmax(mean/√(1 + π/8·variance)) (MacKay 1992; Gibbs 1998), from the variances of the logits alone.

    Args:
        mean: Means of the logits, [..., classes].
        variance: Their variances, [..., classes].
    """
    return (mean / (1 + _LAMBDA * variance).sqrt()).log_softmax(-1)


def extended_probit(mean: Tensor, covariance: Tensor) -> Tensor:
    """Probabilities from the differences of pairs of logits, the mean-field approximation of Lu et al. (2020).

    p_k ∝ 1/Σᵢ exp(−(m_k − mᵢ)/√(1 + π/8·c·v_ki)), v_ki = Σ_kk + Σᵢᵢ − 2Σ_ki the variance of f_k − fᵢ. The paper has
    c = 1, which is right for two classes: σ(m/√(1 + π/8·v)). Of many, the noise of the other logits averages out in
    Σ exp(fᵢ), and v_ki counts it fully; c = ½ + 1/classes is much closer to the integral (docs/prediction.md).

    Args:
        mean: Means of the logits, [..., classes]; −∞ for a class that is impossible.
        covariance: Their covariance, [..., classes, classes].
    """
    classes = mean.shape[-1]
    # Classes first, rows last: sums over classes add up long runs of memory.
    means, pairs = mean.movedim(-1, 0).contiguous(), covariance.movedim((-2, -1), (0, 1)).contiguous()
    variance = pairs.diagonal().movedim(-1, 0)
    pairs = (variance.unsqueeze(0) + variance.unsqueeze(1) - 2 * pairs).clamp_min(0)
    scale = (1 + _LAMBDA * (0.5 + 1 / classes) * pairs).sqrt()
    log_probs = -((means.unsqueeze(0) - means.unsqueeze(1)) / scale).logsumexp(1).movedim(0, -1)
    return log_probs.masked_fill(mean == -torch.inf, -torch.inf).log_softmax(-1)  # else NaN: −∞ less itself


def laplace_bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    """The mean α/Σα of the Dirichlet distribution that the Laplace bridge gives (MacKay 1998; Hobbhahn et al. 2022).

    α_k = (1 − 2/K + e^{m_k}/K²·Σᵢ e^{−mᵢ})/v_k, of logits that are centred first. If their mean variance is above
    √(K/2), means and variances are divided by √c and c, c = that variance/√(K/2): the correction of Hobbhahn et al.,
    which would raise the confidence below it. The least accurate of the three.

    Args:
        mean: Means of the logits, [..., K].
        covariance: Their covariance, [..., K, K].
    """
    classes = mean.shape[-1]
    mean = mean - mean.mean(-1, keepdim=True)
    rows = covariance.mean(-1)
    variance = covariance.diagonal(dim1=-2, dim2=-1) - 2 * rows + rows.mean(-1, keepdim=True)
    # A variance of zero is a Dirichlet of infinite concentration: its mean still needs the ratios of the variances.
    variance = variance.clamp_min(torch.finfo(variance.dtype).tiny ** 0.5)
    excess = (variance.mean(-1, keepdim=True) / math.sqrt(classes / 2)).clamp_min(1.0)
    mean, variance = mean / excess.sqrt(), variance / excess
    # In logs: e^{m} of confident networks overflows.
    log_products = mean - 2 * math.log(classes) + (-mean).logsumexp(-1, keepdim=True)
    rest = 1 - 2 / classes
    log_alpha = log_products if rest == 0 else torch.logaddexp(log_products, torch.full_like(mean, math.log(rest)))
    return (log_alpha - variance.log()).log_softmax(-1)
