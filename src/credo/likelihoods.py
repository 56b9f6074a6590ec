"""Likelihoods: how targets are distributed given a network's outputs."""

from credo.core.likelihood import (
    Bernoulli,
    Categorical,
    CensoredTimes,
    ClassLikelihood,
    DistributionLikelihood,
    GaussianNoise,
    Likelihood,
    MixtureDensity,
    MultiLabel,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Quantiles,
    StudentT,
)

__all__ = [
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
]
