"""Parameterisations of the standard deviation σ by ρ: free, or relative to the mean.

`"free"`: σ = softplus(ρ) for each weight. `"relative"`: σ² = α·μ² with ρ = log α for each weight, the multiplicative
noise of Shridhar et al. (2019); `"relative-layer"`: one α for each tensor of the network.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from credo.core.errors import unknown
from credo.core.network.flat_layout import Layout, inverse_softplus

if TYPE_CHECKING:
    from credo.methods.bbb.gradient_buffers import TorchGradients

# σ of a mean that is exactly zero: log σ in the KL must stay finite.
SMALLEST_STD = 1e-8
SPREADS = ("free", "relative", "relative-layer")


class StdParameterization(Protocol):
    """σ as a function of μ and ρ, flat vectors in the order of a layout, and the chain rule back."""

    per_weight: bool

    def std(self, mean: Tensor, rho: Tensor, layout: Layout) -> Tensor:
        """σ, differentiable by `mean` and `rho`, whose entries belong to tensors as `layout` tells."""
        ...

    def chain_(self, sums: TorchGradients) -> Tensor:
        """The gradient by ρ from that by σ, which is overwritten; what σ takes from μ is added to that by μ."""
        ...

    def rho_for(self, mean: Tensor, std: Tensor) -> Tensor:
        """ρ of each weight that gives these standard deviations at these means."""
        ...

    def scaled(self, rho: Tensor, factor: float) -> Tensor:
        """ρ of standard deviations that are `factor` times as large."""
        ...


class SoftplusStd:
    """σ = softplus(ρ), independent of μ."""

    per_weight = True

    def std(self, mean: Tensor, rho: Tensor, layout: Layout) -> Tensor:
        """softplus(ρ) for each entry of `rho`, whatever `mean` and `layout`."""
        return F.softplus(rho)

    def chain_(self, sums: TorchGradients) -> Tensor:
        """∂σ/∂ρ is the logistic function."""
        return sums.by_std.mul_(torch.sigmoid(sums.rho))

    def rho_for(self, mean: Tensor, std: Tensor) -> Tensor:
        """softplus⁻¹(σ)."""
        return inverse_softplus(std)

    def scaled(self, rho: Tensor, factor: float) -> Tensor:
        """softplus⁻¹(factor·softplus(ρ))."""
        return inverse_softplus(factor * F.softplus(rho))


class RelativeStd:
    """σ = √α·|μ| with ρ = log α.

    Args:
        per_weight: Whether α belongs to a weight (True) or to a tensor.
    """

    def __init__(self, *, per_weight: bool) -> None:
        self.per_weight = per_weight

    def std(self, mean: Tensor, rho: Tensor, layout: Layout) -> Tensor:
        """√α·|μ| from `mean` and `rho`, for tensors as in `layout`; `SMALLEST_STD` where the mean is zero."""
        return (self.log_alpha(rho, layout) / 2).exp().mul(mean.abs()).clamp_min(SMALLEST_STD)

    def chain_(self, sums: TorchGradients) -> Tensor:
        """∂σ/∂log α = σ/2 and ∂σ/∂μ = σ/μ; zero where σ is `SMALLEST_STD`."""
        by_log_std = sums.by_std.mul_(sums.std).mul_(sums.std > SMALLEST_STD)
        sums.by_mean.add_(by_log_std / torch.where(sums.mean == 0, 1.0, sums.mean))
        by_rho = by_log_std / 2
        return by_rho if self.per_weight else torch.stack([piece.sum() for piece in by_rho.split(sums.layout.sizes)])

    def rho_for(self, mean: Tensor, std: Tensor) -> Tensor:
        """log(σ²/μ²), finite also where μ is zero: there σ is lost."""
        return 2 * (std.clamp_min(SMALLEST_STD) / mean.abs().clamp_min(SMALLEST_STD)).log()

    def scaled(self, rho: Tensor, factor: float) -> Tensor:
        """log(factor²·α)."""
        return rho + 2 * math.log(factor)

    def log_alpha(self, rho: Tensor, layout: Layout) -> Tensor:
        """log α for each weight."""
        if self.per_weight:
            return rho
        sizes = torch.tensor(layout.sizes, device=rho.device)
        return rho.repeat_interleave(sizes, output_size=layout.size)


def make_spread(name: str) -> StdParameterization:
    """The parameterisation of that name."""
    if name not in SPREADS:
        raise ValueError(unknown("spread", str(name), SPREADS))
    return SoftplusStd() if name == "free" else RelativeStd(per_weight=name == "relative")
