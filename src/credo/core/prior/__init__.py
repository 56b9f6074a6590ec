"""Prior distributions over weights, and the forms in which a method takes them."""

from credo.core.prior.distributions import HALF_LOG_2PI, Gaussian, Laplace, LayerL2, Prior, ScaleMixture, Value
from credo.core.prior.given import PRECISION, PRIORS, make_prior, one_prior

__all__ = [
    "HALF_LOG_2PI",
    "PRECISION",
    "PRIORS",
    "Gaussian",
    "Laplace",
    "LayerL2",
    "Prior",
    "ScaleMixture",
    "Value",
    "make_prior",
    "one_prior",
]
