"""Scikit-learn's own conformance checks. None is expected to fail: the list of exceptions is empty."""

from collections.abc import Callable
from typing import Any

import pytest
from sklearn.utils.estimator_checks import estimator_checks_generator

from credo.sklearn import BayesianClassifier, BayesianRegressor

# Short training: the checks make hundreds of fits of tables with 10 to 300 rows.
QUICK: dict[str, Any] = {"epochs": 10, "lr": 0.02, "draws": 10}
PAIR = {"members": 2, "of": {"name": "bbb"}}
ESTIMATORS = {
    "classifier": BayesianClassifier(**QUICK),
    "regressor": BayesianRegressor(**QUICK),
    "regressor, early stopping": BayesianRegressor("map", **QUICK, early_stopping=True, noise="heteroscedastic"),
    "classifier, map": BayesianClassifier("map", **QUICK),
    "classifier, mc-dropout": BayesianClassifier("mc-dropout", **QUICK),
    "regressor, ensemble": BayesianRegressor("ensemble", **QUICK, method_options=PAIR),
}
GRID = ("classifier, map", "classifier, mc-dropout", "regressor, ensemble")


def name_of(check: Any) -> str:
    return str(getattr(check, "func", check).__name__)


CHECKS = [
    pytest.param(estimator, check, id=f"{name}: {name_of(check)}", marks=[pytest.mark.grid] if name in GRID else [])
    for name, each in ESTIMATORS.items()
    for estimator, check in estimator_checks_generator(each, expected_failed_checks={})
]


@pytest.mark.parametrize(("estimator", "check"), CHECKS)
@pytest.mark.filterwarnings("default")  # checks provoke warnings and look at them themselves
def test_scikit_learn_check(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


def test_there_are_checks() -> None:
    assert len(CHECKS) > 50 * len(ESTIMATORS)
