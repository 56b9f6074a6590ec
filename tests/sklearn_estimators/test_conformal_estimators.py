"""Conformal sets and intervals of the estimators, in the units and labels of the user."""

import numpy as np
import pytest
from sklearn.datasets import make_classification, make_regression
from sklearn.exceptions import NotFittedError

from credo.sklearn import BayesianClassifier, BayesianRegressor


def test_sets_of_a_classifier_cover_labels_of_any_type() -> None:
    x, codes = make_classification(400, 5, n_informative=4, n_redundant=0, n_classes=3, random_state=0)
    y = np.array(["ant", "bee", "cat"])[codes]
    model = BayesianClassifier("map", hidden=(), epochs=5, random_state=0).fit(x[:100], y[:100])
    with pytest.raises(ValueError, match="conformal"):
        model.predict_set(x)
    assert model.conformal(x[100:250], y[100:250], 0.1, "aps") is model
    sets = model.predict_set(x[250:])
    assert sets.dtype == bool
    inside = sets[np.arange(150), codes[250:]].mean()
    assert 0.8 < inside < 1
    model.conformal(x[100:250], y[100:250], by_class=True)
    assert len(model.posterior_.conformal.thresholds) == 3
    with pytest.raises(ValueError, match="'dog'"):
        model.conformal(x[:3], ["dog", "ant", "bee"])
    with pytest.raises(NotFittedError):
        BayesianClassifier().conformal(x, y)


@pytest.mark.parametrize("outputs", [1, 2])
def test_intervals_of_a_regressor_are_in_its_units(outputs: int) -> None:
    x, y = make_regression(400, 3, n_targets=outputs, noise=5, random_state=0)
    y = 1000 + 7 * y
    model = BayesianRegressor("map", hidden=(), epochs=5, random_state=0).fit(x[:100], y[:100])
    with pytest.raises(ValueError, match="conformal"):
        model.predict_interval(x, conformal=True)
    model.conformal(x[100:250], y[100:250])
    lower, upper = model.predict_interval(x[250:], conformal=True)
    assert lower.shape == y[250:].shape
    inside = ((lower <= y[250:]) & (y[250:] <= upper)).reshape(150, -1).all(1).mean()
    assert 0.8 < inside < 1
