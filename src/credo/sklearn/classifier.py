"""`BayesianClassifier`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from credo.core.likelihood import Categorical
from credo.sklearn.base import DTYPES, Array, BayesianEstimator, UncertaintyArrays


class BayesianClassifier(ClassifierMixin, BayesianEstimator):  # type: ignore[misc]
    """A Bayesian neural network as a scikit-learn classifier, with probabilities averaged over weights.

    Takes the arguments of `BayesianEstimator`. Labels may be of any sortable type. `sample_weight` and `class_weight`
    are not supported, since reweighted data have another posterior. float32 inputs train in float32, all others in
    float64.

    Attributes:
        posterior_: The trained posterior, for inputs (X - `input_mean_`) / `input_std_`.
        classes_: Labels, in the order of the probability columns.
        history_: One `EpochRecord` per epoch.
        n_features_in_, feature_names_in_: As in all scikit-learn estimators.
    """

    classes_: Array

    _rates: ClassVar[Mapping[str, float]] = {"optimizer": 3e-3, "inverse_every": 1e-3}

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803
        """Train on rows X [n, features] and labels y [n], from scratch."""
        x, labels = validate_data(self, X, y, dtype=DTYPES)
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        return self._fit(x, codes.astype(np.int64), len(self.classes_), Categorical)

    def predict(self, X: ArrayLike) -> Array:  # noqa: N803
        """The most probable label of each row."""
        best = self.predict_proba(X).argmax(1)
        labels: Array = self.classes_[best]
        return labels

    def predict_proba(self, X: ArrayLike) -> Array:  # noqa: N803
        """Class probabilities [n, classes], averaged over the draws."""
        probs: Array = self._predict(X).probs.numpy()
        return probs

    def predict_log_proba(self, X: ArrayLike) -> Array:  # noqa: N803
        """Logarithms of the averaged probabilities; −inf where one is 0."""
        with np.errstate(divide="ignore"):
            logs: Array = np.log(self.predict_proba(X))
        return logs

    def conformal(self, X: ArrayLike, y: ArrayLike, alpha: float = 0.1, kind: str = "lac", **options: Any) -> Self:  # noqa: N803
        """Choose the thresholds of `predict_set` on rows that `fit` has not seen; stored in `posterior_.conformal`.

        Args:
            X: Calibration rows [n, features].
            y: Their labels [n].
            alpha: Probability that a set misses the label.
            kind: `"lac"`, `"aps"` or `"raps"`.
            options: Further arguments of `credo.conformal`, such as `by_class=True`.
        """
        check_is_fitted(self)
        x, labels = validate_data(self, X, y, reset=False, dtype=DTYPES)
        known = np.isin(labels, self.classes_)
        if not known.all():
            raise ValueError(f"y has labels that fit has not seen, such as {labels[~known][0]!r}.")
        return self._conform(x, np.searchsorted(self.classes_, labels), alpha, kind, options)

    def predict_set(self, X: ArrayLike) -> Array:  # noqa: N803
        """Which labels of `classes_` are in the set of each row, bool [n, classes]; after `conformal`."""
        sets = self._predict(X).sets
        if sets is None:
            raise ValueError("Call conformal(X, y) first, with rows that fit has not seen.")
        found: Array = sets.numpy()
        return found

    def uncertainty(self, X: ArrayLike, decomposition: str = "entropy") -> UncertaintyArrays:  # noqa: N803
        """Total, aleatoric and epistemic uncertainty of each row.

        Args:
            X: Rows [n, features].
            decomposition: As in `credo.ClassPrediction.uncertainty`; by default entropies in nats.
        """
        split = self._predict(X).uncertainty(decomposition)
        return UncertaintyArrays(split.total.numpy(), split.aleatoric.numpy(), split.epistemic.numpy())
