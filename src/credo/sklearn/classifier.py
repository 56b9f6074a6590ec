"""The classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from credo.core.likelihood import Categorical
from credo.sklearn.base import DTYPES, Array, BayesianEstimator, Doubt
from credo.sklearn.building import Model, RandomState


class BayesianClassifier(ClassifierMixin, BayesianEstimator):  # type: ignore[misc]
    """A Bayesian neural network as a scikit-learn classifier: probabilities averaged over weights.

    `method` is a name of `credo.METHODS`, `method_options` go to its constructor. The network is a ReLU perceptron with
    `hidden` layers, or `model`: a module, or a function of the numbers of inputs and outputs that makes one.
    `prior_precision` is 1/variance of every weight before the data, `temperature` the weight of the prior's share of
    the loss (1: the exact posterior; below: more faith in the data). `standardize` scales inputs by statistics of the
    training rows. A prediction averages over `draws` networks, the same ones in every call.

    Labels may be of any kind that can be sorted. `sample_weight` and `class_weight` are not supported: the posterior of
    reweighted data is none of the data at hand. float32 inputs train in float32, all others in float64.

    Attributes:
        posterior_: the trained posterior; it expects (X - `input_mean_`) / `input_std_`.
        classes_: the labels, in the order of the probabilities' columns.
        history_: one `EpochRecord` for each epoch.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.
    """

    classes_: Array

    _rates: ClassVar[Mapping[str, float]] = {
        **dict.fromkeys(("map", "mc-dropout", "bbb", "node-bnn"), 3e-3),
        **dict.fromkeys(("vogn", "ogn"), 1e-2),
        **dict.fromkeys(("kfac", "noisy-kfac"), 1e-3),
        "ivon": 0.1,
    }

    def __init__(
        self,
        method: str = "bbb",
        *,
        hidden: Sequence[int] = (100,),
        model: Model = None,
        prior_precision: float = 10.0,
        temperature: float = 0.1,
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
        """Train on rows X [n, features] and labels y [n]; forgets any earlier fit."""
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

    def uncertainty(self, X: ArrayLike, decomposition: str = "entropy") -> Doubt:  # noqa: N803
        """Total, aleatoric and epistemic uncertainty of each row; by default entropies in nats.

        The decompositions are those of `credo.ClassPrediction.uncertainty`.
        """
        split = self._predict(X).uncertainty(decomposition)
        return Doubt(split.total.numpy(), split.aleatoric.numpy(), split.epistemic.numpy())
