"""Real values that are not Gaussian: heavy tails, several modes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F

from credo.core.likelihood.base import diagonal_vectors, natural_scale_step_
from credo.core.likelihood.distribution import DistributionLikelihood
from credo.core.likelihood.gaussian import MIN_STD
from credo.core.likelihood.special_functions import student_cdf
from credo.core.support.validate import checked_count, is_number

_NODES = 16  # of the quadrature in each Gaussian of a mixture


class _StudentDistribution(distributions.StudentT):
    def cdf(self, value: Tensor) -> Tensor:
        """By SciPy."""
        return student_cdf(float(self.df.flatten()[0]), (value - self.loc) / self.scale)


class StudentT(DistributionLikelihood):
    """Regression whose noise has heavy tails: the outputs [batch, targets] are centres of Student's t distributions.

    An outlier pulls the fit by a bounded force, where Gaussian noise would let it pull without limit.

    Args:
        df: Degrees of freedom, above 2, so that there is a variance; 4 is a usual choice, 30 almost Gaussian.
        scale: Scale of the noise in the targets' units. None: learned; `fit` starts it at the first batch's spread.
    """

    kind = "student-t"

    def __init__(self, df: float = 4.0, scale: float | None = None) -> None:
        super().__init__()
        if not (is_number(df) and 2 < df < math.inf):
            raise ValueError(f"df={df!r:.80} must be above 2: below, the noise has no variance.")
        if scale is not None and not (is_number(scale) and 0 < scale < math.inf):
            raise ValueError(f"scale={scale!r:.80} must be positive, or None to learn it.")
        self.df, self.scale = float(df), scale
        start = math.log(1.0 if scale is None else scale)
        self.log_scale = nn.Parameter(torch.tensor(start), requires_grad=scale is None)

    def distribution(self, outputs: Tensor) -> distributions.Distribution:
        """Student's t around the outputs."""
        scale = self.log_scale.to(outputs).exp().expand_as(outputs)
        return _StudentDistribution(torch.full_like(outputs, self.df), outputs, scale, validate_args=False)

    def mean_and_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """The centre, and scale²·ν/(ν − 2)."""
        variance = torch.exp(2 * self.log_scale.to(outputs)) * (self.df / (self.df - 2))
        return outputs, variance.expand_as(outputs)

    @torch.no_grad()
    def start_(self, y: Tensor, average: Callable[[Sequence[Tensor]], object] | None = None) -> None:
        """Start a learned scale at 1.48 × the median distance from the median, which outliers do not move."""
        if self.scale is not None:
            return
        values = y.double().flatten()
        spread = [1.4826 * (values - values.median()).abs().median()]
        if average is not None:
            average(spread)
        if float(spread[0]) > 0:
            self.log_scale.fill_(math.log(float(spread[0])))

    def update_(self, step: int) -> bool:
        """Natural-gradient step on the scale."""
        return natural_scale_step_(self.log_scale, 2 * self.df / (self.df + 3) * self._entries, step)

    def curvature_factors(self, outputs: Tensor) -> Tensor:
        """√((ν + 1)/(ν + 3))/scale for each target."""
        return diagonal_vectors(self.curvature_diagonal(outputs).sqrt().view_as(outputs))

    def curvature_diagonal(self, outputs: Tensor) -> Tensor:
        """(ν + 1)/(ν + 3)/scale²."""
        precision = (self.df + 1) / (self.df + 3) * torch.exp(-2 * self.log_scale.detach().to(outputs))
        return precision.expand(len(outputs), outputs[0].numel())

    def config(self) -> dict[str, Any]:
        """Kind and options; a learned scale is saved with the tensors."""
        return {"kind": self.kind, "df": self.df, "scale": self.scale}


class MixtureDensity(DistributionLikelihood):
    """Regression with a mixture of Gaussians for each target, where the same input has several answers (Bishop 1994).

    For each target the network has 3·components outputs: logits of the components' weights, their means, and their
    standard deviations before a softplus: outputs [batch, targets·3·components].

    Args:
        components: Number of Gaussians.
    """

    kind = "mixture-density"

    def __init__(self, components: int = 3) -> None:
        super().__init__()
        self.components = checked_count("components", components, what="Gaussians")

    def distribution(self, outputs: Tensor) -> distributions.Distribution:
        """The mixture of each target."""
        if outputs.shape[-1] % (3 * self.components):
            raise ValueError(
                f"MixtureDensity({self.components}) needs {3 * self.components} outputs for each target, got "
                f"{outputs.shape[-1]} in all."
            )
        logits, mean, std = self._parts(outputs)
        parts = distributions.Normal(mean, std, validate_args=False)
        weights = distributions.Categorical(logits=logits, validate_args=False)
        return distributions.MixtureSameFamily(weights, parts, validate_args=False)

    def quadrature(self, outputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Points of Gauss and Hermite in each component, weighted by the component's weight."""
        logits, mean, std = self._parts(outputs)
        share = logits.softmax(-1)
        for node, weight in zip(*np.polynomial.hermite_e.hermegauss(_NODES), strict=True):
            for part in range(self.components):
                y = mean[..., part] + float(node) * std[..., part]
                yield y, share[..., part] * float(weight) / math.sqrt(2 * math.pi)

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the weights, means and standard deviations, [..., targets, components] each."""
        logits, mean, raw = outputs.unflatten(-1, (-1, 3, self.components)).unbind(-2)
        return logits, mean, F.softplus(raw) + MIN_STD
