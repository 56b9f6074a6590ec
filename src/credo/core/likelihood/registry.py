"""The likelihoods that have names, and how one is made from a name or a description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from credo.core.errors import unknown
from credo.core.likelihood.base import Likelihood
from credo.core.likelihood.classes import Bernoulli, Categorical, Ordinal
from credo.core.likelihood.counts import NegativeBinomial, Poisson
from credo.core.likelihood.gaussian import GaussianNoise
from credo.core.likelihood.labels import MultiLabel
from credo.core.likelihood.quantiles import Quantiles
from credo.core.likelihood.times import CensoredTimes
from credo.core.likelihood.values import MixtureDensity, StudentT

_OURS: tuple[type[Likelihood], ...] = (
    Categorical,
    Bernoulli,
    GaussianNoise,
    MultiLabel,
    Ordinal,
    Poisson,
    NegativeBinomial,
    StudentT,
    MixtureDensity,
    Quantiles,
    CensoredTimes,
)
LIKELIHOODS: dict[str, type[Likelihood]] = {one.kind: one for one in _OURS}


def make_likelihood(given: Likelihood | Mapping[str, Any] | str | None) -> Likelihood:
    """Build a likelihood from an object, its name, its description (`{"kind": "gaussian", "std": 0.1}`) or None."""
    if given is None:
        return Categorical()
    if isinstance(given, Likelihood):
        return given
    if not isinstance(given, str | Mapping):
        raise ValueError(_not_a_likelihood(given))
    options = {"kind": given} if isinstance(given, str) else dict(given)
    kind = options.pop("kind", "categorical")
    if str(kind) not in LIKELIHOODS:
        raise ValueError(unknown("likelihood", str(kind), LIKELIHOODS))
    try:
        return LIKELIHOODS[kind](**options)
    except TypeError as error:
        raise ValueError(f"Likelihood {kind!r}: {error}.") from error


def _not_a_likelihood(given: object) -> str:
    possible = (
        f"{', '.join(map(repr, LIKELIHOODS))}, a description such as {{'kind': 'gaussian', 'std': 0.1}}, or an object"
    )
    if isinstance(given, type) and issubclass(given, Likelihood):
        return f"likelihood={given.__name__} is a class: give an instance, {given.__name__}(...)."
    return (
        f"likelihood={given!r:.80} is not a likelihood: possible are {possible} such as credo.GaussianNoise(0.1). Pass "
        "a custom loss to step(nll) or fit(..., nll=), or derive a class from credo.Likelihood."
    )
