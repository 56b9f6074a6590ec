"""`BayesianRegressor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from credo.predict import RegressionPrediction, rescaled
from credo.sklearn.base import DTYPES, Array, BayesianEstimator, UncertaintyArrays, statistics
from credo.sklearn.building import Model, RandomState
from credo.sklearn.noise import make_noise


class BayesianRegressor(RegressorMixin, BayesianEstimator):  # type: ignore[misc]
    """A Bayesian neural network as a scikit-learn regressor, with means, standard deviations and intervals.

    Targets are [n] or [n, outputs]. `sample_weight` is not supported.

    Args:
        noise: Observation noise: `"learned"` (one standard deviation for each output), `"heteroscedastic"` (a function
            of the inputs; the network then has twice as many outputs), or a known standard deviation in units of y.
        method, hidden, model, prior_precision, temperature, lr, epochs, batch_size, draws, method_options: As in
            `BayesianEstimator`.
        standardize: Scale inputs and targets; results are in the units of y.
        early_stopping, validation_fraction, n_iter_no_change, random_state, verbose: As in `BayesianEstimator`.

    Attributes:
        posterior_: The trained posterior, from (X - `input_mean_`) / `input_std_` to
            (y - `target_mean_`) / `target_std_`.
        history_: One `EpochRecord` per epoch.
        n_features_in_, feature_names_in_: As in all scikit-learn estimators.
    """

    target_mean_: Array
    target_std_: Array

    _rates: ClassVar[Mapping[str, float]] = {"optimizer": 2e-2, "inverse_every": 3e-3}

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
        shared = {key: value for key, value in locals().items() if key not in ("self", "noise", "__class__")}
        super().__init__(**shared)
        self.noise = noise

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803
        """Train on rows X [n, features] and targets y [n] or [n, outputs], from scratch."""
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

    def conformal(
        self,
        X: ArrayLike,  # noqa: N803
        y: ArrayLike,
        alpha: float = 0.1,
        kind: str = "normalised",
    ) -> Self:
        """Choose the widths of `predict_interval(X, conformal=True)` on rows that `fit` has not seen.

        Args:
            X: Calibration rows [n, features].
            y: Their targets, in the shape of those of `fit`.
            alpha: Probability that an interval misses the target.
            kind: `"normalised"` (a multiple of the predicted standard deviation) or `"split"` (the same width for all).
        """
        check_is_fitted(self)
        x, targets = validate_data(self, X, y, reset=False, dtype=DTYPES, multi_output=True, y_numeric=True)
        scaled = (targets.reshape(len(targets), -1) - self.target_mean_) / self.target_std_
        return self._conform(x, scaled.astype(x.dtype), alpha, kind, {})

    def predict_interval(
        self,
        X: ArrayLike,  # noqa: N803
        coverage: float = 0.9,
        *,
        conformal: bool = False,
    ) -> tuple[Array, Array]:
        """Lower and upper ends of central intervals that contain a new target with probability `coverage`.

        Those of the prediction: of the mixture of draws, or of the distribution that
        `credo.recalibrate(regressor.posterior_, …)` chose.

        Args:
            X: Rows [n, features].
            coverage: Probability of these intervals.
            conformal: Give the intervals of `conformal`, whose coverage was chosen there, instead.
        """
        if not (conformal or 0 < coverage < 1):
            raise ValueError(f"coverage={coverage} must lie between 0 and 1, such as 0.9.")
        values = self._values(X)
        if conformal:
            if values.lower is None or values.upper is None:
                raise ValueError("Call conformal(X, y) first, with rows that fit has not seen.")
            return self._shaped(values.lower), self._shaped(values.upper)
        lower, upper = values.interval(coverage)
        return self._shaped(lower), self._shaped(upper)

    def uncertainty(self, X: ArrayLike) -> UncertaintyArrays:  # noqa: N803
        """Standard deviations of a new target: total² = aleatoric² (noise) + epistemic² (weights)."""
        values = self._values(X)
        return UncertaintyArrays(*(self._shaped(part) for part in (values.total, values.aleatoric, values.epistemic)))

    def _values(self, x: ArrayLike) -> RegressionPrediction:
        prediction: RegressionPrediction = self._predict(x)
        # In float64 even for float32 inputs: targets may lie far from zero.
        return rescaled(prediction, torch.from_numpy(self.target_mean_), torch.from_numpy(self.target_std_))

    def _shaped(self, values: torch.Tensor) -> Array:
        array: Array = values.numpy()
        return array[:, 0] if self._flat else array

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
