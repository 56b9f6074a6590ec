"""Bayesian neural networks for any torch module: calibrated probabilities and honest uncertainty.

A posterior is a module around your untouched network; it can draw weights, make one update step, and predict.
"""

from credo import optim
from credo.continual.gaussian_algebra import compare, merge
from credo.core.distributed.process_group import Team
from credo.core.distributed.setup import distribute
from credo.core.errors import (
    CredoError,
    DivergenceWarning,
    FileFormatError,
    LostProcessError,
    NonFiniteError,
    UnsupportedModelError,
)
from credo.core.example_counts import Counted
from credo.core.likelihood import Bernoulli, Categorical, GaussianNoise, Likelihood
from credo.core.network.batchnorm import frozen_statistics, refresh_statistics
from credo.core.per_example.api import per_example_squares
from credo.core.posterior import GaussianPosterior, Posterior, Terms
from credo.core.prior import Gaussian, Laplace, LayerL2, Prior, ScaleMixture
from credo.doctor import Diagnosis, Finding, diagnose
from credo.evaluate import ensemble_study, measure, sample_study
from credo.methods import (
    BBB,
    IVON,
    KFAC,
    MAP,
    METHODS,
    OGN,
    VOGN,
    AdversarialSampling,
    Ensemble,
    MCDropout,
    NodeBNN,
    NoisyKFAC,
)
from credo.models import summary
from credo.predict import ClassPrediction, Predictor, RegressionPrediction, predict, predictor
from credo.training import describe, fit, load, save, train
from credo.version import __version__

__all__ = [
    "BBB",
    "IVON",
    "KFAC",
    "MAP",
    "METHODS",
    "OGN",
    "VOGN",
    "AdversarialSampling",
    "Bernoulli",
    "Categorical",
    "ClassPrediction",
    "Counted",
    "CredoError",
    "Diagnosis",
    "DivergenceWarning",
    "Ensemble",
    "FileFormatError",
    "Finding",
    "Gaussian",
    "GaussianNoise",
    "GaussianPosterior",
    "Laplace",
    "LayerL2",
    "Likelihood",
    "LostProcessError",
    "MCDropout",
    "NodeBNN",
    "NoisyKFAC",
    "NonFiniteError",
    "Posterior",
    "Predictor",
    "Prior",
    "RegressionPrediction",
    "ScaleMixture",
    "Team",
    "Terms",
    "UnsupportedModelError",
    "__version__",
    "compare",
    "describe",
    "diagnose",
    "distribute",
    "ensemble_study",
    "fit",
    "frozen_statistics",
    "load",
    "measure",
    "merge",
    "optim",
    "per_example_squares",
    "predict",
    "predictor",
    "refresh_statistics",
    "sample_study",
    "save",
    "summary",
    "train",
]
