"""What single networks predict: values of functions, draw by draw."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from credo.core.likelihood import ClassLikelihood
from credo.core.network.inputs import AnyInputs
from credo.core.posterior import Posterior
from credo.core.sampling import evaluating
from credo.predict.draw_loop import draw_loop
from credo.predict.moments import class_log_probs, gaussian_likelihoods
from credo.predict.run import check_posterior


class FunctionDraws(NamedTuple):
    """Predictions of several networks for the same inputs.

    Attributes:
        values: Class probabilities, or means of a regression, [draws, batch, outputs].
        noise: Standard deviations of the targets, in the same shape; None for classes.
    """

    values: Tensor
    noise: Tensor | None


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
    values = torch.cat([part.values for part in found], dim=1)
    noise = [part.noise for part in found if part.noise is not None]
    return FunctionDraws(values, torch.cat(noise, dim=1) if noise else None)


def _predicted(posterior: Posterior, outputs: Tensor) -> FunctionDraws:
    calibration = posterior.calibration
    if isinstance(posterior.likelihood, ClassLikelihood):
        temperature = 1.0 if calibration is None else calibration.temperature
        probs = class_log_probs(posterior.likelihood, outputs, temperature).exp()
        return FunctionDraws(probs.double().flatten(2).cpu(), None)
    factor = 1.0 if calibration is None else calibration.std_factor
    parts = gaussian_likelihoods([part.likelihood for part in posterior.parts])
    moments = [parts[index % len(parts)].moments(output) for index, output in enumerate(outputs)]
    mean, std = (
        torch.stack(entries).double().reshape(len(outputs), outputs.shape[1], -1).cpu()
        for entries in zip(*moments, strict=True)
    )
    return FunctionDraws(mean, factor * std)
