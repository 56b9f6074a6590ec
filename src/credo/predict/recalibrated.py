"""Apply the map that `credo.recalibrate` chose to a prediction, after averaging over draws."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from credo.core.held_out.calibration import Calibration
from credo.core.held_out.class_maps import ClassMap
from credo.core.held_out.value_map import ResidualMap
from credo.predict.result import ClassPrediction, Prediction, RegressionPrediction


def recalibrated(prediction: Prediction, calibration: Calibration | None) -> Prediction:
    """The same prediction with the map of its probabilities, or the distribution of its residuals.

    Args:
        prediction: As the draws give it.
        calibration: Of the posterior, if there is one.
    """
    recalibration = None if calibration is None else calibration.recalibration
    made = None if recalibration is None else recalibration.map
    if made is None:
        return prediction
    if isinstance(prediction, ClassPrediction) and isinstance(made, ClassMap):
        return _classes(prediction, made)
    if isinstance(prediction, RegressionPrediction) and isinstance(made, ResidualMap):
        return _values(prediction, made)
    raise ValueError(f"A {type(prediction).__name__} cannot be recalibrated by a {type(made).__name__}.")


def _classes(prediction: ClassPrediction, made: ClassMap) -> ClassPrediction:
    """Both parts of each uncertainty are scaled alike, so that they add up to that of the new probabilities."""
    made.check_classes(prediction.probs.shape[1])
    probs = made(prediction.probs)
    targets, density = prediction.targets, None
    if targets is not None:
        density = torch.log(probs.double().clamp_min(torch.finfo(probs.dtype).tiny)).gather(1, targets[:, None])[:, 0]
        density = density.to(probs.dtype)
    entropy, before = torch.special.entr(probs).sum(-1), prediction.mean_entropy + prediction.mutual_information
    mean_entropy, information = _divided(entropy, prediction.mean_entropy, prediction.mutual_information)
    aleatoric, epistemic = _divided(probs * (1 - probs), prediction.aleatoric_by_class, prediction.epistemic_by_class)
    return replace(
        prediction,
        probs=probs,
        log_likelihood=density,
        mean_entropy=mean_entropy,
        mutual_information=information,
        entropy_deviation=prediction.entropy_deviation * torch.where(before > 0, entropy / before, 1.0),
        aleatoric_by_class=aleatoric,
        epistemic_by_class=epistemic,
    )


def _divided(total: Tensor, aleatoric: Tensor, epistemic: Tensor) -> tuple[Tensor, Tensor]:
    """A new total in the old parts; without any uncertainty before, all of it is aleatoric."""
    before = aleatoric + epistemic
    part = torch.where(before == 0, 0.0, epistemic / before)
    return total * (1 - part), total * part


def _values(prediction: RegressionPrediction, made: ResidualMap) -> RegressionPrediction:
    """Mean and standard deviations are those of the new distribution; outputs are independent of one another in it.

    It takes the place of the mixture of draws: without `residuals` it is normal.
    """
    mean, total, shape = prediction.mean.double(), prediction.total.double(), prediction.mean.shape[1:]
    if shape.numel() != len(made.scale):
        raise ValueError(f"the map of residuals is for {len(made.scale)} outputs, not {shape.numel()}")
    density = None
    if prediction.targets is not None:
        residuals = ((prediction.targets.double() - mean) / total).reshape(len(mean), -1)
        density = made.log_density(residuals).sum(1) - total.log().reshape(len(mean), -1).sum(1)
    factor = made.std.reshape(shape)
    return replace(
        prediction,
        log_likelihood=density,
        mean=(mean + total * made.mean.reshape(shape)).to(prediction.mean),
        aleatoric=(prediction.aleatoric * factor).to(prediction.aleatoric),
        epistemic=(prediction.epistemic * factor).to(prediction.epistemic),
        residuals=None if made.is_normal else made,
        offsets=None,
        stds=None,
    )
