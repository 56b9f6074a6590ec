"""Confidence of a classifier on inputs far from all data: noise with ten times their standard deviation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from credo.core.posterior import Posterior
from credo.doctor import thresholds as limits
from credo.doctor.measure.predictive import ClassPredictive, Predictive, predict_draws
from credo.doctor.subset import Subset

_ROWS, _DRAWS = 200, 16


@dataclass(frozen=True)
class FarInputs:
    """What the posterior says of noise.

    Attributes:
        confidence: Mean probability of the most probable class for the noise.
        on_data: The same for the examples that were evaluated.
        stds: Standard deviation of the noise, in those of the inputs.
    """

    confidence: float
    on_data: float
    stds: float


def far_inputs(posterior: Posterior, evaluated: Subset, on_test: Predictive, *, seed: int) -> FarInputs | None:
    """Measure the confidence on noise; None for a regression, and for inputs that are not one tensor of numbers.

    Args:
        posterior: The posterior.
        evaluated: Examples, whose inputs give mean and standard deviation of the noise, each entry by itself.
        on_test: Predictions for them.
        seed: Seed of the noise and of the draws.
    """
    x = evaluated.x
    if not isinstance(on_test, ClassPredictive) or not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    rows = min(_ROWS, len(x))
    mean, std = x.double().mean(0), x.double().std(0, correction=0)
    std = std.clamp_min(1e-3 * float(std.max()))  # pixels that are always black
    noise = torch.randn(rows, *x.shape[1:], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    far = (mean + limits.FAR_STDS * std * noise.to(x.device)).to(x.dtype)
    found = predict_draws(
        posterior, replace(evaluated, x=far, y=evaluated.y[:rows]), draws=min(on_test.draws, _DRAWS), seed=seed
    )
    assert isinstance(found, ClassPredictive)
    confidence = found.pooled.double().amax(-1).mean()
    if not bool(confidence.isfinite()):
        return None
    return FarInputs(float(confidence), float(on_test.pooled.double().amax(-1).mean()), limits.FAR_STDS)
