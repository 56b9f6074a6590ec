"""Predictions: plain tensors on the CPU, one row per input."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from credo.core.errors import unknown

P = TypeVar("P", bound="Prediction")
DECOMPOSITIONS = ("entropy", "covariance", "entropy-deviation")


@dataclass(frozen=True)
class Uncertainty:
    """Total, aleatoric and epistemic uncertainty of each input, [n] each."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


@dataclass(frozen=True, repr=False)
class Prediction:
    """Fields common to classification and regression.

    `draws_used` [n] counts weight draws per input; `targets` are those of the loader, if any; `log_likelihood` [n] is
    log p̄(target) under the whole mixture of draws, None without targets. Rows that are not `finite`, which
    `predict(..., on_nonfinite="mark")` leaves in, hold NaN.
    """

    _checked: ClassVar[tuple[str, ...]] = ()
    """The fields that are NaN or infinite if the outputs of any draw were."""

    draws_used: Tensor
    targets: Tensor | None
    log_likelihood: Tensor | None

    def __len__(self) -> int:
        return len(self.draws_used)

    @property
    def finite(self) -> Tensor:
        """Which rows have a prediction, [n]: the outputs of every draw for them are finite."""
        finite = torch.ones(len(self), dtype=torch.bool)
        for name in self._checked:
            finite &= getattr(self, name).isfinite().reshape(len(self), -1).all(-1)
        return finite

    def __repr__(self) -> str:
        """Names and shapes, not the numbers."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        shapes = [f"{name} {list(value.shape)}" for name, value in tensors.items() if value is not None]
        return f"{type(self).__name__}({', '.join(shapes)})"


@dataclass(frozen=True, repr=False)
class ClassPrediction(Prediction):
    """Class probabilities averaged over draws, and three decompositions of their uncertainty.

    `total`, `aleatoric` and `epistemic` are the entropy decomposition (nats); `uncertainty(name)` gives the others.
    `mc_error` [n] estimates the standard error of the least certain class probability.
    """

    _checked = ("probs",)

    probs: Tensor
    mean_entropy: Tensor
    mutual_information: Tensor
    entropy_deviation: Tensor
    aleatoric_by_class: Tensor
    epistemic_by_class: Tensor
    mc_error: Tensor

    @property
    def labels(self) -> Tensor:
        """The most probable class; −1 for rows that are not `finite`."""
        return self.probs.argmax(-1).masked_fill(~self.finite, -1)

    @property
    def confidence(self) -> Tensor:
        """Probability of the most probable class."""
        return self.probs.amax(-1)

    @property
    def total(self) -> Tensor:
        """Entropy of the averaged probabilities."""
        return self.uncertainty("entropy").total

    @property
    def aleatoric(self) -> Tensor:
        """Average entropy of the draws."""
        return self.uncertainty("entropy").aleatoric

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of label and weights."""
        return self.uncertainty("entropy").epistemic

    def uncertainty(self, decomposition: str = "entropy") -> Uncertainty:
        """Decompose the uncertainty of each input; p_s are the probabilities of draw s, p̄ their mean.

        Args:
            decomposition: `"entropy"`: total H[p̄], aleatoric mean H[p_s], epistemic their difference, the mutual
                information of label and weights. `"covariance"` (Kwon et al. 2018, traces): Σ p̄(1−p̄) =
                Σ mean p_s(1−p_s) + Σ var p_s. `"entropy-deviation"` (Zhang et al. 2022): aleatoric Ha = mean H[p_s],
                epistemic mean |H[p_s] − Ha|, total their sum, which is not H[p̄].
        """
        if decomposition == "entropy":
            total = torch.special.entr(self.probs).sum(-1)
            # Not the difference of the two, which float32 would round away for confident inputs.
            return Uncertainty(total, self.mean_entropy, self.mutual_information)
        if decomposition == "covariance":
            aleatoric, epistemic = self.aleatoric_by_class.sum(-1), self.epistemic_by_class.sum(-1)
            return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)
        if decomposition == "entropy-deviation":
            total = self.mean_entropy + self.entropy_deviation
            return Uncertainty(total, self.mean_entropy, self.entropy_deviation)
        raise ValueError(unknown("decomposition", decomposition, DECOMPOSITIONS))


@dataclass(frozen=True, repr=False)
class RegressionPrediction(Prediction):
    """Predictive mean and standard deviations, each [n, outputs]; total² = aleatoric² + epistemic²."""

    _checked = ("mean", "aleatoric", "epistemic")

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor

    @property
    def total(self) -> Tensor:
        """Standard deviation of a new target."""
        return torch.hypot(self.aleatoric, self.epistemic)  # whose squares may be 0 or infinite in float32


def rescaled(prediction: RegressionPrediction, mean: Tensor, std: Tensor) -> RegressionPrediction:
    """Convert a prediction to the units of the targets before they were standardised, (target − mean)/std.

    Args:
        prediction: In the units of training.
        mean: Mean of the targets; float64 if they lie far from zero, and then the result is float64, too.
        std: Standard deviation of the targets.
    """
    targets, density = prediction.targets, prediction.log_likelihood
    return RegressionPrediction(
        draws_used=prediction.draws_used,
        targets=None if targets is None else targets * std + mean,
        log_likelihood=None if density is None else density - std.log().sum(),
        mean=prediction.mean * std + mean,
        aleatoric=prediction.aleatoric * std,
        epistemic=prediction.epistemic * std,
    )


def concatenate(parts: list[P]) -> P:
    """Join the predictions of consecutive batches."""
    if not parts:
        raise ValueError("Nothing to predict: there was no input.")
    if len(parts) == 1:
        return parts[0]
    merged: dict[str, Any] = {}
    for field in fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        merged[field.name] = None if any(v is None for v in values) else torch.cat(values)
    return type(parts[0])(**merged)
