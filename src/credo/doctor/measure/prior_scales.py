"""What the evidence and held-out rows say about the prior's precision, where a posterior follows from it at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from credo.core.posterior import Posterior
from credo.core.prior import Gaussian
from credo.doctor.subset import Subset
from credo.evaluate.intervals import Interval, paired_difference
from credo.predict.run import predict

FACTORS = (0.01, 0.1, 1.0, 10.0, 100.0)


@dataclass(frozen=True)
class PriorScales:
    """Evidence and held-out NLL under the prior's precision times each of `FACTORS`.

    Attributes:
        evidence: log p(D) in nats, for each factor.
        nll: Mean held-out NLL, for each factor.
        by_evidence: The factor with the largest evidence.
        by_held_out: The factor with the lowest NLL.
        gap: How much larger the NLL is at the evidence's factor than at its own best, with a 95 % interval.
        std: The prior's standard deviation at factor 1; None if weights have several.
    """

    evidence: list[float]
    nll: list[float]
    by_evidence: float
    by_held_out: float
    gap: Interval
    std: float | None


@torch.no_grad()
def prior_scales(posterior: Posterior, held_out: Subset, *, seed: int = 0) -> PriorScales | None:
    """Try other precisions of the prior on a copy; None for methods that would have to be trained again.

    None also where held-out rows have chosen the scale of the noise already, by `credo.calibrate`.

    Args:
        posterior: Of one part, with or without a prior.
        held_out: Rows that training has not seen.
        seed: Seed of the draws, where predictions need some.
    """
    if len(posterior.parts) > 1 or posterior.describe().scale_prior is None or posterior.calibration is not None:
        return None
    tried, prior = posterior.uncalibrated(), posterior.describe().prior
    about = tried.describe()
    assert about.evidence is not None
    assert about.scale_prior is not None
    evidence, rows, before = [], [], 1.0
    for factor in FACTORS:
        about.scale_prior(factor / before)
        before = factor
        evidence.append(about.evidence())
        rows.append(-_by_example(predict(tried, held_out.split(256), seed=seed).log_likelihood.double()))
    nll = [float(each.mean()) for each in rows]
    chosen, best = evidence.index(max(evidence)), nll.index(min(nll))
    std = prior.std if isinstance(prior, Gaussian) and isinstance(prior.std, float) else None
    gap = paired_difference(rows[chosen], rows[best])
    return PriorScales(evidence, nll, FACTORS[chosen], FACTORS[best], gap, std)


def _by_example(log_likelihood: Tensor) -> Tensor:
    """One number for each example: the mean over its labels that count, without examples that have none."""
    if log_likelihood.dim() == 1:
        return log_likelihood
    means = log_likelihood.flatten(1).nanmean(1)
    return means[~means.isnan()]
