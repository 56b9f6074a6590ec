"""Priors as they are given to a method: objects, descriptions, a standard deviation, a precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from credo.core.arguments import Replaced
from credo.core.errors import unknown
from credo.core.prior.distributions import Gaussian, Laplace, LayerL2, Prior, ScaleMixture, Value
from credo.core.support.validate import is_number

PRIORS: dict[str, type[Prior]] = {
    "gaussian": Gaussian,
    "laplace": Laplace,
    "scale-mixture": ScaleMixture,
    "layer-l2": LayerL2,
}


def make_prior(given: Prior | Mapping[str, Any] | float | None, default: Prior | None = None) -> Prior:
    """Build a prior.

    Args:
        given: A prior, its description (`{"kind": "laplace", "b": 0.1}`), the std of a Gaussian, or None.
        default: Used for None; a standard Gaussian unless given.
    """
    if given is None:
        return Gaussian() if default is None else default
    if isinstance(given, Prior):
        return given
    if isinstance(given, int | float):
        return Gaussian(std=float(given))
    if not isinstance(given, Mapping):
        raise ValueError(
            f"prior={given!r:.80} is not a prior: give a Gaussian's standard deviation, an object such as "
            "credo.priors.Laplace(b=0.1), or a description such as {'kind': 'laplace', 'b': 0.1}."
        )
    options = {key: _placeholder(value) for key, value in given.items()}
    kind = options.pop("kind", "gaussian")
    if kind not in PRIORS:
        raise ValueError(unknown("prior", str(kind), PRIORS))
    try:
        return PRIORS[kind](**options)
    except TypeError as error:
        raise ValueError(f"Prior {kind!r}: {error}.") from error


def one_prior(
    prior: Prior | Mapping[str, Any] | float | None, precision: Value | None
) -> Prior | Mapping[str, Any] | float | None:
    """The prior that was given, or the Gaussian about zero with that precision; raises ValueError for both.

    Args:
        prior: The argument `prior` of a method.
        precision: Its argument `prior_precision`: a positive number, a vector, or values by parameter name.
    """
    if precision is None:
        return prior
    if prior is not None:
        raise ValueError("prior and prior_precision were given: they exclude each other.")
    for entry in precision.values() if isinstance(precision, Mapping) else (precision,):
        if not (is_number(entry) or isinstance(entry, Tensor)):
            raise ValueError(
                f"prior_precision={precision!r:.80} must be a positive number, a tensor with an entry for each random "
                "weight, or such values by parameter name, {'*.bias': 1.0, '*': 10.0}."
            )
        if not bool((torch.as_tensor(entry) > 0).all()):
            raise ValueError(f"prior_precision={precision} must be positive.")
    if isinstance(precision, Mapping):
        return Gaussian(0.0, {name: entry**-0.5 for name, entry in precision.items()})
    return Gaussian(0.0, precision**-0.5)


def _place_precision(arguments: dict[str, Any], precision: Value | None) -> None:
    """Put the prior among the arguments, as a description if it has no tensors."""
    if precision is not None:
        prior = one_prior(arguments.get("prior"), precision)
        assert isinstance(prior, Gaussian)
        std = prior._given["scale"]
        has_tensors = any(isinstance(v, Tensor) for v in (std.values() if isinstance(std, Mapping) else (std,)))
        arguments["prior"] = prior if has_tensors else {"kind": "gaussian", "mean": 0.0, "std": std}


# For methods whose constructor has no `prior_precision` of its own.
PRECISION = Replaced("prior=…", _place_precision, until=None)


def _placeholder(value: Any) -> Any:
    # A vector is described by its length; its values are loaded with the saved tensors.
    is_vector = isinstance(value, Mapping) and set(value) == {"entries"}
    return torch.ones(value["entries"]) if is_vector else value
