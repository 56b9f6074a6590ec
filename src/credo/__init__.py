"""Bayesian neural networks for any torch module: calibrated probabilities and honest uncertainty.

A posterior is a module around your untouched network; it can draw weights, make one update step, and predict.
"""

from credo.core.batchnorm import frozen_statistics, refresh_statistics
from credo.core.errors import CredoError, FileFormatError, NonFiniteError, UnsupportedModelError
from credo.core.likelihood import Bernoulli, Categorical, GaussianNoise, Likelihood
from credo.core.posterior import GaussianPosterior, Posterior, Terms
from credo.core.prior import Gaussian, Laplace, LayerL2, Prior, ScaleMixture
from credo.evaluate import measure, sample_study
from credo.methods import BBB, MAP, METHODS, Ensemble, MCDropout
from credo.predict import ClassPrediction, RegressionPrediction, predict
from credo.training import describe, fit, load, save, train
from credo.version import __version__

__all__ = [
    "BBB",
    "MAP",
    "METHODS",
    "Bernoulli",
    "Categorical",
    "ClassPrediction",
    "CredoError",
    "Ensemble",
    "FileFormatError",
    "Gaussian",
    "GaussianNoise",
    "GaussianPosterior",
    "Laplace",
    "LayerL2",
    "Likelihood",
    "MCDropout",
    "NonFiniteError",
    "Posterior",
    "Prior",
    "RegressionPrediction",
    "ScaleMixture",
    "Terms",
    "UnsupportedModelError",
    "__version__",
    "describe",
    "fit",
    "frozen_statistics",
    "load",
    "measure",
    "predict",
    "refresh_statistics",
    "sample_study",
    "save",
    "train",
]
