"""How `auto` measures a posterior: on the rows that choose, on rows that decide nothing, and on OOD inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.calibration import calibrated_losses
from credo.calibration.choose import PRIOR
from credo.core.errors import NonFiniteError
from credo.core.held_out.calibration import Calibration
from credo.core.likelihood import Categorical, ClassLikelihood, GaussianNoise
from credo.core.network.inputs import AnyInputs
from credo.core.posterior import Posterior
from credo.core.support.files import finite
from credo.evaluate.calibration import ece
from credo.evaluate.detection import ood_detection
from credo.evaluate.intervals import bootstrap
from credo.evaluate.predictive import coverage_of
from credo.evaluate.suite import quick_metrics
from credo.predict import ClassPrediction, RegressionPrediction, predict
from credo.training.plan import constant_loss
from credo.training.rows.given_back import PRIOR as RETURNED
from credo.training.rows.given_back import carried_over
from credo.tuning.jobs import Entry
from credo.tuning.rows import Pairs
from credo.tuning.rules import DROP_LEVEL

OOD = "ood_auroc"


@dataclass(frozen=True)
class Scoring:
    """The rows that choose, OOD inputs, and how both are predicted.

    Attributes:
        selection: The rows that choose, and calibrate.
        outside: Batches of OOD inputs, which choose nothing; empty: none are given.
        draws: Networks to average over.
        seed: Seed of the draws.
    """

    selection: Pairs
    outside: list[AnyInputs]
    draws: int
    seed: int

    def calibrates(self, posterior: Posterior) -> bool:
        """Whether it is measured with a calibration.

        Args:
            posterior: The posterior.
        """
        return isinstance(posterior.likelihood, ClassLikelihood | GaussianNoise)

    def constant(self, posterior: Posterior) -> float | None:
        """Mean NLL of the best constant prediction of the rows that choose; None where there is no simple one.

        Args:
            posterior: Whose likelihood says what targets are.
        """
        likelihood, y = posterior.likelihood, torch.cat([targets for _, targets in self.selection])
        plain = type(likelihood) is Categorical and y.dim() == 1 and bool((y >= 0).all())
        return constant_loss(y) if plain or isinstance(likelihood, GaussianNoise) else None

    def score(self, posterior: Posterior, *, returns: bool = False) -> dict[str, Any]:
        """Calibrate, and measure: losses, calibration and scores of an `Entry`.

        Args:
            posterior: What is measured.
            returns: Whether it will be trained on these rows, too: what they choose is a guess then, and drawn to 1.
        """
        if self.calibrates(posterior):
            options: dict[str, Any] = {"draws": self.draws, "seed": self.seed, "prior": RETURNED if returns else PRIOR}
            losses = calibrated_losses(posterior, self.selection, progress=False, **options)
            prediction = self._predicted(posterior, self.selection)
        else:
            prediction = self._predicted(posterior, self.selection)
            losses = losses_of(prediction)
        if not bool(torch.isfinite(losses).all()):
            raise NonFiniteError("the NLL of held-out rows is not finite.")
        made = posterior.calibration
        calibration = None if made is None else finite(made.to_dict())
        scores = finite(scores_of(prediction) | self._detection(posterior, prediction))
        return {"losses": losses.tolist(), "calibration": calibration, "scores": scores}

    def report(self, posterior: Posterior, rows: Pairs) -> dict[str, Any]:
        """NLL with its interval, and scores, of rows that decided nothing.

        Args:
            posterior: With its calibration.
            rows: The rows.
        """
        prediction = self._predicted(posterior, rows)
        ends = bootstrap(losses_of(prediction), level=DROP_LEVEL)
        scores = scores_of(prediction) | self._detection(posterior, prediction)
        return {"nll": ends.value, "interval": (ends.low, ends.high), **scores}

    def _predicted(self, posterior: Posterior, rows: Any) -> Any:
        return predict(posterior, rows, draws=self.draws, seed=self.seed)

    def _detection(self, posterior: Posterior, inside: Any) -> dict[str, float]:
        """AUROC of telling OOD inputs from the rows of a prediction by the total uncertainty."""
        if not self.outside:
            return {}
        other = self._predicted(posterior, self.outside)
        return {OOD: ood_detection(*(_uncertainty(prediction) for prediction in (inside, other))).auroc}


def _uncertainty(prediction: Any) -> Tensor:
    """Total uncertainty of each row, the mean over outputs or positions."""
    total: Tensor = prediction.total.double().cpu()
    return total.reshape(len(total), -1).mean(1)


def losses_of(prediction: Any) -> Tensor:
    """NLL of each row of a prediction with targets.

    Args:
        prediction: What `credo.predict` returned.
    """
    losses: Tensor = -prediction.log_likelihood.double().cpu().reshape(len(prediction), -1).sum(1)
    return losses


def scores_of(prediction: Any) -> dict[str, float]:
    """Accuracy and ECE, or RMSE and the coverage of 90 % intervals.

    Args:
        prediction: What `credo.predict` returned, with targets.
    """
    found = {name: value for name, value in quick_metrics(prediction).items() if name != "nll"}
    if isinstance(prediction, ClassPrediction):
        assert prediction.targets is not None
        found["ece"] = ece(prediction.probs, prediction.targets)
    elif isinstance(prediction, RegressionPrediction) and "rmse" in found:
        found["coverage"] = coverage_of(prediction, (0.9,))[0.9]
    return found


def calibrated_by(posterior: Posterior, entry: Entry, *, went_on: bool = False) -> Posterior:
    """The same posterior, with the calibration of its result.

    Args:
        posterior: A posterior.
        entry: The result of its job.
        went_on: Whether its training went on after that.
    """
    known = None if entry.calibration is None else Calibration.from_dict(entry.calibration)
    posterior.calibration = known if known is None or not went_on else carried_over(known)
    return posterior
