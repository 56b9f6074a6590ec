"""Warn where networks with drawn weights predict worse than the network at the mean."""

from __future__ import annotations

import torch
from torch import Tensor

from credo.core.errors import PredictiveWarning
from credo.core.network.inputs import AnyInputs
from credo.core.posterior import Posterior
from credo.core.sampling import noise_scaled
from credo.core.support.user_warnings import warn
from credo.predict.draw_loop import make_moments, run_draws
from credo.predict.result import ClassPrediction, Prediction

# A loss of this much, in nats or as a fraction of the inputs, that is not chance, which is three standard errors.
_NATS, _ACCURACY, _ERRORS = 0.1, 0.02, 3.0


class WeightsCheck:
    """Compares predictions by drawn weights with those of the mean network, on the same targets.

    Args:
        frozen: A snapshot of the posterior of these predictions.
        seed: Seed of random numbers in the passes of the mean network.
    """

    def __init__(self, frozen: Posterior, seed: int) -> None:
        self.frozen, self.seed = frozen, seed
        self._nll: list[tuple[Tensor, Tensor]] = []
        self._hits: list[tuple[Tensor, Tensor]] = []

    def add(self, drawn: Prediction, x: AnyInputs, y: Tensor) -> None:
        """Add the prediction of one batch by drawn weights, and make that of the mean network.

        Args:
            drawn: The prediction, with the targets.
            x: Inputs of the batch.
            y: Its targets.
        """
        mean = self._at_mean(x, y)
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
            method = type(self.frozen.parts[0]).__name__
            warn(
                "Networks with drawn weights predict these targets worse than the network at the mean: "
                f"{', '.join(found)}. {method} does not train under noise: leave predictive='weights' out, and "
                "its linearised predictions are used.",
                PredictiveWarning,
            )

    def _at_mean(self, x: AnyInputs, y: Tensor) -> Prediction:
        parts = self.frozen.parts
        with self.frozen.seeded(self.seed), noise_scaled(self.frozen, 0.0):
            outputs = run_draws(self.frozen, self.frozen.iter_draws(len(parts)), x)
        likelihoods = [part.likelihood for part in parts]
        return make_moments(likelihoods, outputs, y, calibration=self.frozen.calibration).result()
