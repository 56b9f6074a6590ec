"""The regressor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import NormalDist
from typing import Any, ClassVar, Self

import torch
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data

from credo.predict import RegressionPrediction, rescaled
from credo.sklearn.base import DTYPES, Array, BayesianEstimator, Doubt, statistics
from credo.sklearn.building import Model, RandomState
from credo.sklearn.noise import make_noise


class BayesianRegressor(RegressorMixin, BayesianEstimator):  # type: ignore[misc]
    """A Bayesian neural network as a scikit-learn regressor: means, standard deviations and intervals.

    Parameters are those of `BayesianClassifier`; `standardize` scales targets, too, and all results are in their own
    units. `noise` is how targets scatter around the network: `"learned"` (one standard deviation for each output),
    `"heteroscedastic"` (a function of the inputs, read off the network, which has twice as many outputs then), or a
    number, the known standard deviation. Targets are [n] or [n, outputs]. `sample_weight` is not supported.

    Attributes:
        posterior_: the trained posterior; it expects (X - `input_mean_`) / `input_std_` and gives
            (y - `target_mean_`) / `target_std_`.
        history_: one `EpochRecord` for each epoch.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.
    """

    target_mean_: Array
    target_std_: Array

    _rates: ClassVar[Mapping[str, float]] = {
        **dict.fromkeys(("map", "mc-dropout", "bbb", "node-bnn"), 2e-2),
        **dict.fromkeys(("vogn", "ogn"), 1e-2),
        **dict.fromkeys(("kfac", "noisy-kfac"), 3e-3),
        "ivon": 0.1,
    }

    def __init__(
        self,
        method: str = "bbb",
        *,
        hidden: Sequence[int] = (50,),
        model: Model = None,
        noise: str | float = "learned",
        prior_precision: float = 10.0,
        temperature: float = 0.5,
        lr: float | None = None,
        epochs: int | None = None,
        batch_size: int = 64,
        draws: int = 100,
        method_options: Mapping[str, Any] | None = None,
        standardize: bool = True,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        random_state: RandomState = None,
        verbose: int = 0,
    ) -> None:
        self.method = method
        self.hidden = hidden
        self.model = model
        self.noise = noise
        self.prior_precision = prior_precision
        self.temperature = temperature
        self.lr = lr
        self.epochs = epochs
        self.batch_size = batch_size
        self.draws = draws
        self.method_options = method_options
        self.standardize = standardize
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803
        """Train on rows X [n, features] and targets y [n] or [n, outputs]; forgets any earlier fit."""
        x, targets = validate_data(self, X, y, dtype=DTYPES, multi_output=True, y_numeric=True)
        self._flat = targets.ndim == 1
        columns = targets.reshape(len(targets), -1)
        self.target_mean_, self.target_std_ = statistics(columns, standardize=self.standardize)
        scaled = ((columns - self.target_mean_) / self.target_std_).astype(x.dtype)
        doubled = self.noise == "heteroscedastic"
        outputs = scaled.shape[1] * (2 if doubled else 1)
        return self._fit(x, scaled, outputs, partial(make_noise, self.noise, scaled.std(0), self.target_std_))

    def predict(self, X: ArrayLike, return_std: bool = False) -> Array | tuple[Array, Array]:  # noqa: N803
        """Predictive means; with `return_std` also the standard deviation of a new target, noise included; float64."""
        values = self._values(X)
        mean = self._shaped(values.mean)
        return (mean, self._shaped(values.total)) if return_std else mean

    def predict_interval(self, X: ArrayLike, coverage: float = 0.9) -> tuple[Array, Array]:  # noqa: N803
        """Lower and upper ends of central intervals that shall hold a new target with probability `coverage`.

        Those of a Gaussian with the predictive mean and standard deviation, which a mixture over draws only resembles.
        """
        if not 0 < coverage < 1:
            raise ValueError(f"coverage={coverage} must lie between 0 and 1, such as 0.9.")
        mean, std = self.predict(X, return_std=True)
        half = NormalDist().inv_cdf((1 + coverage) / 2) * std
        return mean - half, mean + half

    def uncertainty(self, X: ArrayLike) -> Doubt:  # noqa: N803
        """Standard deviations of a new target: total² = aleatoric² (noise) + epistemic² (weights)."""
        values = self._values(X)
        return Doubt(*(self._shaped(part) for part in (values.total, values.aleatoric, values.epistemic)))

    def _values(self, x: ArrayLike) -> RegressionPrediction:
        prediction: RegressionPrediction = self._predict(x)
        # In float64 even for inputs of float32: targets may lie far from zero.
        return rescaled(prediction, torch.from_numpy(self.target_mean_), torch.from_numpy(self.target_std_))

    def _shaped(self, values: torch.Tensor) -> Array:
        array: Array = values.numpy()
        return array[:, 0] if self._flat else array

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
