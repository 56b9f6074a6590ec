"""What `calibrate` can choose something for."""

from __future__ import annotations

from credo.core.likelihood import ClassLikelihood, DistributionLikelihood, GaussianNoise, MultiLabel, Quantiles
from credo.core.posterior import Posterior


def check_calibratable(posterior: Posterior) -> None:
    """Raise TypeError if there is nothing to choose, with what to do instead.

    Args:
        posterior: To be calibrated.
    """
    likelihood, method = posterior.likelihood, type(posterior).__name__
    name = type(likelihood).__name__
    if isinstance(likelihood, ClassLikelihood | GaussianNoise | MultiLabel):
        return
    if isinstance(likelihood, Quantiles):
        raise TypeError(
            "calibrate lowers the NLL of held-out rows, and Quantiles has no distribution of the targets. Compare the "
            "part of held-out targets below each quantile with its level: `below` of credo.measure."
        )
    if not isinstance(likelihood, DistributionLikelihood):
        raise TypeError(
            f"calibrate needs predictions of {name}: derive it from DistributionLikelihood (values and counts) or "
            "ClassLikelihood of credo.likelihoods."
        )
    if not scales_noise(posterior):
        raise TypeError(
            f"calibrate has nothing to choose for {method} with {name}: such targets have no temperature, and this "
            "posterior no noise of weights to scale. Use a likelihood with a width of its own (NegativeBinomial "
            "instead of Poisson), or a posterior with noise, such as credo.BBB."
        )


def scales_noise(posterior: Posterior) -> bool:
    """Whether its noise has a scale.

    Args:
        posterior: To be calibrated.
    """
    return posterior.is_random and all(part.has_noise_scale for part in posterior.parts)
