"""Which sums over draws belong to a likelihood."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from credo.core.held_out.calibration import Calibration
from credo.core.likelihood import (
    Categorical,
    ClassLikelihood,
    DistributionLikelihood,
    GaussianNoise,
    Likelihood,
    MultiLabel,
    Quantiles,
)
from credo.predict.kinds.dense import DenseMoments
from credo.predict.kinds.distributions import DistributionMoments
from credo.predict.kinds.labels import LabelMoments
from credo.predict.kinds.quantiles import QuantileMoments
from credo.predict.moments import ClassMoments, Moments, OneClassDraw, RegressionMoments, gaussian_likelihoods

_UNCALIBRATED = Calibration()


def make_moments(
    likelihoods: Sequence[Likelihood],
    outputs: Tensor,
    targets: Tensor | None,
    *,
    single: bool = False,
    calibration: Calibration | None = None,
) -> Moments:
    """Start the sums that belong to a likelihood.

    Args:
        likelihoods: One, or those of a mixture's members, which the draws are of in turn.
        outputs: Of the first draws, for all rows of a batch: [draws, batch, …].
        targets: Targets of the batch, if there are any.
        single: Whether there is one network only, and no further draw.
        calibration: Its temperature or factor on the noise is applied to each draw.
    """
    first, chosen = likelihoods[0], calibration or _UNCALIBRATED
    if isinstance(first, ClassLikelihood):
        if isinstance(first, Categorical) and outputs.dim() > 3:  # a class for each position
            return DenseMoments(first, outputs, targets, chosen.temperature)
        return (OneClassDraw if single else ClassMoments)(first, outputs, targets, chosen.temperature)
    if isinstance(first, GaussianNoise):
        return RegressionMoments(gaussian_likelihoods(likelihoods), outputs, targets, chosen.std_factor)
    if isinstance(first, DistributionLikelihood):
        return DistributionMoments(likelihoods, outputs, targets)
    if isinstance(first, MultiLabel):
        return LabelMoments(outputs, targets, chosen.temperature)
    if isinstance(first, Quantiles):
        return QuantileMoments(likelihoods, outputs, targets)
    raise TypeError(
        f"predict cannot average {type(first).__name__}: derive it from DistributionLikelihood (values and counts) or "
        "ClassLikelihood of credo.likelihoods."
    )
