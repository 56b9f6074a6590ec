"""`method="auto"` of the estimators."""

import numpy as np

from credo.sklearn import BayesianRegressor


def test_the_estimator_lets_auto_choose() -> None:
    x = np.random.default_rng(0).normal(size=(120, 2))
    y = x[:, 0] + 0.1 * np.random.default_rng(1).normal(size=120)
    found = BayesianRegressor("auto", hidden=(8,), epochs=6, batch_size=32, random_state=0).fit(x, y)
    assert found.posterior_.evidence is not None
    assert found.posterior_.evidence.selection_rows == 24
    assert found.predict(x).shape == (120,)
