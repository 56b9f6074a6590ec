"""How a standard deviation follows from its parameter: by itself, or as a learned share of its mean.

`"free"`: σ = softplus(ρ) for each weight. `"relative"`: σ² = α·μ² with ρ = log α for each weight, the multiplicative
noise of Shridhar et al. (2019); `"relative-layer"`: one α for each tensor of the network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from credo.core.errors import unknown
from credo.core.network.flat_layout import Layout, inverse_softplus
from credo.methods.bbb.gradient_buffers import Slopes
from credo.methods.bbb.init import initial_rho, normal_or_number

LOG_ALPHA = -10.0
# A mean of exactly zero has no share; log σ of the KL must stay finite there.
SMALLEST_STD = 1e-8
SPREADS = ("free", "relative", "relative-layer")
RhoInit = float | tuple[float, float] | None


class Spread(Protocol):
    """σ as a function of μ and ρ, flat vectors in the order of a layout, and the chain rule back."""

    per_weight: bool

    def std(self, mean: Tensor, rho: Tensor, layout: Layout) -> Tensor:
        """Standard deviations, differentiable by both."""
        ...

    def back_(self, slopes: Slopes, rho: Tensor, layout: Layout) -> Tensor:
        """Derivatives by ρ from those by σ; what σ takes from μ is added to those by μ. Uses up `slopes.std`."""
        ...

    def first(
        self,
        mean: Tensor,
        std_init: float | None,
        relative_std: float | None,
        rho_init: RhoInit,
        generator: torch.Generator,
        layout: Layout,
    ) -> Tensor:
        """ρ before any training."""
        ...

    def rho_for(self, mean: Tensor, std: Tensor) -> Tensor:
        """ρ of each weight that gives these standard deviations at these means."""
        ...


class FreeSpread:
    """σ = softplus(ρ)."""

    per_weight = True

    def std(self, mean: Tensor, rho: Tensor, layout: Layout) -> Tensor:
        """softplus(ρ), whatever the means."""
        return F.softplus(rho)

    def back_(self, slopes: Slopes, rho: Tensor, layout: Layout) -> Tensor:
        """∂σ/∂ρ is the logistic function."""
        return slopes.std.mul_(torch.sigmoid(rho))

    def first(
        self,
        mean: Tensor,
        std_init: float | None,
        relative_std: float | None,
        rho_init: RhoInit,
        generator: torch.Generator,
        layout: Layout,
    ) -> Tensor:
        """From at most one of the three choices."""
        return initial_rho(mean, std_init, relative_std, rho_init, generator)

    def rho_for(self, mean: Tensor, std: Tensor) -> Tensor:
        """softplus⁻¹(σ)."""
        return inverse_softplus(std)


class RelativeSpread:
    """σ = √α·|μ|, ρ = log α, of each weight or of each tensor."""

    def __init__(self, *, per_weight: bool) -> None:
        self.per_weight = per_weight

    def std(self, mean: Tensor, rho: Tensor, layout: Layout) -> Tensor:
        """√α·|μ|, and a tiny number where the mean is zero."""
        return (self.log_alpha(rho, layout) / 2).exp().mul(mean.abs()).clamp_min(SMALLEST_STD)

    def back_(self, slopes: Slopes, rho: Tensor, layout: Layout) -> Tensor:
        """∂σ/∂log α = σ/2 and ∂σ/∂μ = σ/μ; none where the floor holds."""
        by_log_std = slopes.std.mul_(slopes.at_std).mul_(slopes.at_std > SMALLEST_STD)
        safe = torch.where(slopes.at_mean == 0, 1.0, slopes.at_mean)
        slopes.mean.add_(by_log_std / safe)
        by_rho = by_log_std / 2
        return by_rho if self.per_weight else _sums(by_rho, layout.sizes)

    def first(
        self,
        mean: Tensor,
        std_init: float | None,
        relative_std: float | None,
        rho_init: RhoInit,
        generator: torch.Generator,
        layout: Layout,
    ) -> Tensor:
        """log α = −10 (Shridhar et al. 2019), or what `relative_std` = √α or `rho_init` = log α says."""
        if std_init is not None:
            raise ValueError(
                f"std_init={std_init}: with spread='relative' σ follows from μ. Give relative_std, the first σ/|μ|, "
                "or rho_init, the first log α."
            )
        if relative_std is not None and rho_init is not None:
            raise ValueError("relative_std and rho_init were given: they exclude each other.")
        if relative_std is not None and not 0 < relative_std < math.inf:
            raise ValueError(f"relative_std={relative_std} must be positive and finite.")
        like = mean if self.per_weight else mean.new_empty(len(layout.names))
        default = LOG_ALPHA if relative_std is None else 2 * math.log(relative_std)
        return normal_or_number(like, default if rho_init is None else rho_init, generator)

    def rho_for(self, mean: Tensor, std: Tensor) -> Tensor:
        """log(σ²/μ²), finite also for a mean of zero, whose noise is lost."""
        return 2 * (std.clamp_min(SMALLEST_STD) / mean.abs().clamp_min(SMALLEST_STD)).log()

    def log_alpha(self, rho: Tensor, layout: Layout) -> Tensor:
        """log α for each weight."""
        if self.per_weight:
            return rho
        sizes = torch.tensor(layout.sizes, device=rho.device)
        return rho.repeat_interleave(sizes, output_size=layout.size)


def make_spread(name: str) -> Spread:
    """The form of that name."""
    if name not in SPREADS:
        raise ValueError(unknown("spread", str(name), SPREADS))
    return FreeSpread() if name == "free" else RelativeSpread(per_weight=name == "relative")


def _sums(values: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.stack([piece.sum() for piece in values.split(list(sizes))])
