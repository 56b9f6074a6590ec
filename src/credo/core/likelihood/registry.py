"""The likelihoods that have names, and how one is made from a name or a description."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
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
# Values of arguments without a default, for messages.
_EXAMPLES = {"classes": 5, "components": 3, "levels": "[0.1, 0.5, 0.9]"}
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
    made, named = LIKELIHOODS[kind], (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    parameters = {name: one for name, one in signature(made).parameters.items() if one.kind in named}
    for name in options:
        if name not in parameters:
            has = unknown("argument", str(name), parameters) if parameters else f"it has no argument {name!r}."
            raise ValueError(f"Likelihood {kind!r}: {has}")
    missing = [name for name, one in parameters.items() if one.default is one.empty and name not in options]
    if missing:
        example = ", ".join(f"{name!r}: {_EXAMPLES.get(name, '…')}" for name in missing)
        called = ", ".join(f"{name}={_EXAMPLES.get(name, '…')}" for name in missing)
        raise ValueError(
            f"likelihood={kind!r} needs {' and '.join(missing)}: give {{'kind': {kind!r}, {example}}} or "
            f"credo.likelihoods.{made.__name__}({called})."
        )
    try:
        return made(**options)
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
