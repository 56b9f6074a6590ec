"""`BayesianClassifier`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

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

    def uncertainty(self, X: ArrayLike, decomposition: str = "entropy") -> UncertaintyArrays:  # noqa: N803
        """Total, aleatoric and epistemic uncertainty of each row.

        Args:
            X: Rows [n, features].
            decomposition: As in `credo.ClassPrediction.uncertainty`; by default entropies in nats.
        """
        split = self._predict(X).uncertainty(decomposition)
        return UncertaintyArrays(split.total.numpy(), split.aleatoric.numpy(), split.epistemic.numpy())
