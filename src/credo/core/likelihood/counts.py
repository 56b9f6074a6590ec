"""Counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributions, nn

from credo.core.likelihood.base import diagonal_vectors, natural_scale_step_
from credo.core.likelihood.distribution import DistributionLikelihood
from credo.core.likelihood.special_functions import regularised_beta
from credo.core.support.validate import is_number


class _PoissonDistribution(distributions.Poisson):
    def cdf(self, value: Tensor) -> Tensor:
        """Q(k + 1, rate), the regularised upper incomplete gamma function."""
        count = value.floor()
        return torch.where(count < 0, 0.0, torch.special.gammaincc(count.clamp_min(0) + 1, self.rate))


class _NegativeBinomialDistribution(distributions.NegativeBinomial):
    def cdf(self, value: Tensor) -> Tensor:
        """I₁₋ₚ(r, k + 1), the regularised incomplete beta function."""
        count = value.floor()
        found = regularised_beta(self.total_count, count.clamp_min(0) + 1, torch.sigmoid(-self.logits))
        return torch.where(count < 0, 0.0, found)


class Poisson(DistributionLikelihood):
    """Counts with a Poisson distribution: the network's outputs [batch, targets] are the logarithms of the rates.

    For counts that vary more than their mean, see `NegativeBinomial`.
    """

    kind = "poisson"

    def distribution(self, outputs: Tensor) -> distributions.Distribution:
        """Poisson(e^output)."""
        return _PoissonDistribution(outputs.exp(), validate_args=False)

    def curvature_factors(self, outputs: Tensor) -> Tensor:
        """√rate for each target."""
        return diagonal_vectors((0.5 * outputs).exp())

    def curvature_diagonal(self, outputs: Tensor) -> Tensor:
        """The rates."""
        return outputs.exp().reshape(len(outputs), -1)


class NegativeBinomial(DistributionLikelihood):
    """Counts with variance μ + α·μ²: the outputs [batch, targets] are the logarithms of the means μ.

    Args:
        dispersion: α, above 0; small values come near a Poisson distribution. None: learned, one for all targets; `fit`
            starts it from the first batch's mean and variance.
    """

    kind = "negative-binomial"

    def __init__(self, dispersion: float | None = None) -> None:
        super().__init__()
        if dispersion is not None and not (is_number(dispersion) and 0 < dispersion < math.inf):
            raise ValueError(f"dispersion={dispersion!r:.80} must be positive, or None to learn it.")
        self.dispersion = dispersion
        start = math.log(1.0 if dispersion is None else dispersion)
        self.log_dispersion = nn.Parameter(torch.tensor(start), requires_grad=dispersion is None)

    def distribution(self, outputs: Tensor) -> distributions.Distribution:
        """Mean e^output, 1/α failures."""
        log_dispersion = self.log_dispersion.to(outputs)
        count = torch.exp(-log_dispersion).expand_as(outputs)
        return _NegativeBinomialDistribution(count, logits=outputs + log_dispersion, validate_args=False)

    @torch.no_grad()
    def start_(self, y: Tensor, average: Callable[[Sequence[Tensor]], object] | None = None) -> None:
        """Start a learned dispersion at (variance − mean) / mean², at least 0.01."""
        if self.dispersion is not None:
            return
        moments = [y.double().mean(), y.double().square().mean()]
        if average is not None:
            average(moments)
        mean, variance = float(moments[0]), float(moments[1] - moments[0].square())
        if mean > 0:
            self.log_dispersion.fill_(math.log(min(max((variance - mean) / mean**2, 0.01), 100.0)))

    def update_(self, step: int) -> bool:
        """Natural-gradient step on the dispersion, with the information of strong dispersion."""
        return natural_scale_step_(self.log_dispersion, 0.5 * self._entries, step)

    def curvature_factors(self, outputs: Tensor) -> Tensor:
        """√(μ/(1 + αμ)) for each target."""
        return diagonal_vectors(self.curvature_diagonal(outputs).sqrt().view_as(outputs))

    def curvature_diagonal(self, outputs: Tensor) -> Tensor:
        """μ/(1 + αμ)."""
        mean = outputs.exp()
        return (mean / (1 + self.log_dispersion.detach().exp().to(mean) * mean)).reshape(len(outputs), -1)

    def config(self) -> dict[str, Any]:
        """Kind and dispersion; a learned one is saved with the tensors."""
        return {"kind": self.kind, "dispersion": self.dispersion}
