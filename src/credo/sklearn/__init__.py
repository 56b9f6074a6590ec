"""Scikit-learn estimators: Bayesian networks in pipelines, grid searches and cross-validation."""

from credo.core.support.extras import needs

with needs("sklearn", "credo.sklearn"):
    from credo.sklearn.classifier import BayesianClassifier
    from credo.sklearn.regressor import BayesianRegressor

__all__ = ["BayesianClassifier", "BayesianRegressor"]
