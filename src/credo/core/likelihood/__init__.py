"""Likelihoods: distributions of targets given a network's outputs."""

from credo.core.likelihood.base import NOISE_RATE, Likelihood
from credo.core.likelihood.classes import IGNORED, Bernoulli, Categorical, ClassLikelihood, Ordinal
from credo.core.likelihood.counts import NegativeBinomial, Poisson
from credo.core.likelihood.distribution import DistributionLikelihood
from credo.core.likelihood.gaussian import MIN_STD, GaussianNoise
from credo.core.likelihood.labels import MultiLabel
from credo.core.likelihood.quantiles import Quantiles
from credo.core.likelihood.registry import LIKELIHOODS, make_likelihood
from credo.core.likelihood.times import CensoredTimes
from credo.core.likelihood.values import MixtureDensity, StudentT

__all__ = [
    "IGNORED",
    "LIKELIHOODS",
    "MIN_STD",
    "NOISE_RATE",
    "Bernoulli",
    "Categorical",
    "CensoredTimes",
    "ClassLikelihood",
    "DistributionLikelihood",
    "GaussianNoise",
    "Likelihood",
    "MixtureDensity",
    "MultiLabel",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "Quantiles",
    "StudentT",
    "make_likelihood",
]
