"""What single networks predict: values of functions, draw by draw."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from credo.core.likelihood import (
    ClassLikelihood,
    DistributionLikelihood,
    GaussianNoise,
    Likelihood,
    MultiLabel,
    Quantiles,
)
from credo.core.network.inputs import AnyInputs
from credo.core.posterior import Posterior
from credo.core.sampling import evaluating
from credo.predict.draw_loop import draw_loop
from credo.predict.moments import class_log_probs
from credo.predict.run import check_posterior


class FunctionDraws(NamedTuple):
    """Predictions of several networks for the same inputs.

    Attributes:
        values: Probabilities of classes or of several labels, quantiles, or means of all other targets, [draws, batch,
            outputs].
        is_class: Whether they are probabilities of classes.
    """

    values: Tensor
    is_class: bool


@torch.no_grad()
def function_draws(
    posterior: Posterior, x: AnyInputs, *, draws: int, seed: int, batch_size: int = 1024
) -> FunctionDraws:
    """Predictions of the same `draws` networks for all inputs, calibrated if the posterior is.

    Args:
        posterior: The posterior; a point estimate gives one network, a mixture equally many of each part.
        x: Inputs.
        draws: Number of networks.
        seed: Seed of the draws.
        batch_size: Rows of one pass.
    """
    check_posterior(posterior)
    draws = posterior.whole_draws(draws)
    found = []
    with evaluating(posterior, seed) as frozen:
        loop = draw_loop(frozen, x[:batch_size].to(frozen.device), draws=draws, shared=True)
        for rows in x.split(batch_size):
            with frozen.seeded(seed):
                loop.begin()
                outputs = loop.outputs(rows.to(frozen.device), draws)
            found.append(_predicted(frozen, outputs))
    return FunctionDraws(torch.cat(found, dim=1), isinstance(posterior.likelihood, ClassLikelihood))


def _predicted(posterior: Posterior, outputs: Tensor) -> Tensor:
    temperature = 1.0 if posterior.calibration is None else posterior.calibration.temperature
    if isinstance(posterior.likelihood, ClassLikelihood):
        values = class_log_probs(posterior.likelihood, outputs, temperature).exp()
    else:
        parts = [part.likelihood for part in posterior.parts]  # each may have learned a noise of its own
        means = [_expected(parts[index % len(parts)], output, temperature) for index, output in enumerate(outputs)]
        values = torch.stack(means).reshape(*outputs.shape[:2], -1)
    return values.double().cpu()


def _expected(likelihood: Likelihood, outputs: Tensor, temperature: float) -> Tensor:
    """What one network predicts of the targets, whatever their noise."""
    if isinstance(likelihood, GaussianNoise):
        return likelihood.moments(outputs)[0]
    if isinstance(likelihood, DistributionLikelihood):
        return likelihood.mean_and_variance(outputs)[0]
    if isinstance(likelihood, MultiLabel):
        return (outputs / temperature).sigmoid()
    if isinstance(likelihood, Quantiles):
        return likelihood.quantiles(outputs)
    raise TypeError(
        f"Predictions of {type(likelihood).__name__} cannot be compared: derive your likelihood from "
        "DistributionLikelihood or ClassLikelihood."
    )
