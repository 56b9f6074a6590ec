"""Warnings of draws: none that differ, for want of a pass or samples; or worse predictions than the mean network's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from credo.core.errors import PredictiveWarning
from credo.core.likelihood import Quantiles
from credo.core.posterior import Posterior
from credo.core.support.user_warnings import warn
from credo.predict.result import ClassPrediction, Prediction

# A loss of this much, in nats or as a fraction of the inputs, that is not chance, which is three standard errors.
_NATS, _ACCURACY, _ERRORS = 0.1, 0.02, 3.0
_IS_TRAINING = ContextVar("is_training", default=False)


@contextmanager
def while_training() -> Iterator[None]:
    """While open, in this thread, nothing is warned of: what a method finds after training is not there yet."""
    token = _IS_TRAINING.set(True)
    try:
        yield
    finally:
        _IS_TRAINING.reset(token)


def warn_if_unfitted(posterior: Posterior, *, calibrates: bool = False) -> None:
    """Warn if a method that has draws would predict with the network at the mean alone, or with a scale by chance.

    Args:
        posterior: What predicts.
        calibrates: Whether it is about to be calibrated, which mends a scale.
    """
    if _IS_TRAINING.get():
        return
    for part in dict.fromkeys((posterior, *posterior.parts)):
        settled = part.steps or calibrates or posterior.calibration or isinstance(part.likelihood, Quantiles)
        unlearned = [] if settled else part.likelihood.unlearned
        if part.uncertainty_needs:
            warn(
                f"This {type(part).__name__} predicts with the network as it is, without any uncertainty of its "
                f"weights. It needs {part.uncertainty_needs}. For a point estimate use credo.MAP.",
                PredictiveWarning,
            )
            return
        if unlearned:
            name = type(part.likelihood).__name__
            warn(
                f"Nothing has learned {', '.join(unlearned)} of {name} yet: predictions assume the value that it "
                "was made with. For a network that is trained already, credo.Laplace(model, …).fit(loader) finds it, "
                "and credo.calibrate(posterior, held_out) corrects the width of predictions; credo.fit learns it in "
                f"training; if you know the value, give it to credo.{name}.",
                PredictiveWarning,
            )
            return


class WeightsCheck:
    """Compares predictions by drawn weights with those of the mean network, on the same targets.

    Args:
        posterior: The posterior of these predictions.
    """

    def __init__(self, posterior: Posterior) -> None:
        self.method = type(posterior.parts[0]).__name__
        self._nll: list[tuple[Tensor, Tensor]] = []
        self._hits: list[tuple[Tensor, Tensor]] = []

    def add(self, drawn: Prediction, mean: Prediction) -> None:
        """Add the predictions of one batch, both with its targets."""
        assert drawn.log_likelihood is not None
        assert mean.log_likelihood is not None
        self._nll.append((-drawn.log_likelihood.double(), -mean.log_likelihood.double()))
        if isinstance(drawn, ClassPrediction) and isinstance(mean, ClassPrediction) and drawn.targets is not None:
            self._hits.append((drawn.labels.eq(drawn.targets).double(), mean.labels.eq(drawn.targets).double()))

    def warn(self) -> None:
        """Warn if the mean network is clearly better."""
        found = []
        for name, pairs, sign, least in (("accuracy", self._hits, -1, _ACCURACY), ("NLL", self._nll, 1, _NATS)):
            if not pairs:
                continue
            drawn, mean = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
            loss = sign * (drawn - mean)
            error = float(loss.std(correction=0)) / len(loss) ** 0.5
            if float(loss.mean()) > max(least, _ERRORS * error):
                found.append(f"{name} {drawn.mean():.3g} instead of {mean.mean():.3g}")
        if found:
            warn(
                "Networks with drawn weights predict these targets worse than the network at the mean: "
                f"{', '.join(found)}. {self.method} does not train under noise: leave predictive='weights' out, and "
                "its linearised predictions are used.",
                PredictiveWarning,
            )
