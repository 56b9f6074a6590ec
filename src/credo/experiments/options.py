"""Options of data, network and method: their defaults, written out, and type checks.

Defaults are recorded because a later version may have others. Options that an experiment fills in itself (sizes, seeds)
are left out.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from credo.core.likelihood import LIKELIHOODS
from credo.data import Dataset
from credo.data.registry import find_spec
from credo.methods import METHODS, Ensemble
from credo.models.registry import model_options

_MEMBERS = 5
# Filled in by the experiment.
_FOR_MODELS = {"inputs", "classes", "seed"}
_FOR_METHODS = {"self", "model", "data_size", "batches"}
# TOML has no null.
NONE = "none"
Options = Mapping[str, inspect.Parameter]


def data_with_defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """The [data] section with every option of its data set; raises on an unknown name."""
    parameters = inspect.signature(find_spec(table["name"]).load).parameters
    return _completed(table, {key: p for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY})


def model_with_defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] section with every option of its network."""
    return _completed(table, model_options(table["name"]), without=_FOR_MODELS)


def method_with_defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """The [method] section with every option of its constructor, for an ensemble also those of the members."""
    if METHODS[table["name"]] is Ensemble:
        of = method_with_defaults({"name": "map", **table.get("of", {})})
        return {"name": table["name"], "members": _MEMBERS, **table, "of": of}
    return _completed(table, method_options(table["name"]), without={"seed"})


def method_options(name: str) -> dict[str, inspect.Parameter]:
    """Arguments of a method's constructor, except those that an experiment fills in."""
    if METHODS[name] is Ensemble:  # its constructor takes finished members
        options = {"members": _MEMBERS, "of": {"name": "map"}}
        return {key: inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=v) for key, v in options.items()}
    parameters = inspect.signature(METHODS[name]).parameters
    return {key: p for key, p in parameters.items() if key not in _FOR_METHODS}


def means_none(value: Any, option: inspect.Parameter | None) -> bool:
    """Whether an option that may be None is given as None or `"none"`."""
    if value not in (None, NONE) or option is None:
        return False
    return any(word in str(option.annotation) for word in ("None", "Optional"))


def in_words(table: Mapping[str, Any]) -> dict[str, Any]:
    """A section for TOML, with `"none"` for None."""
    nested = {key: in_words(value) for key, value in table.items() if key == "of"}
    return {key: NONE if value is None else value for key, value in {**table, **nested}.items()}


def _completed(table: Mapping[str, Any], options: Options, without: Collection[str] = ()) -> dict[str, Any]:
    """The table with the defaults of options that it does not give, as JSON values."""
    given = {key: None if means_none(value, options.get(key)) else value for key, value in table.items()}
    known = {key: p.default for key, p in options.items() if key not in without and p.default is not p.empty}
    return {"name": table["name"], **json.loads(json.dumps(known)), **given}


# -- type checks -----------------------------------------------------------------------------------------------------


def check_types(section: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ValueError if one of the `options` of a `section` does not have the type of its `defaults`.

    Only where the default is a number, boolean or list.
    """
    for key, value in options.items():
        wanted = _wanted(defaults.get(key))
        if wanted and not _fits(value, defaults[key]):
            raise ValueError(f"{section}.{key}={value!r} must be {wanted}; the default is {defaults[key]!r}.")


def _wanted(default: Any) -> str | None:
    # Not strings: many stand for something that may also be a number, a list or a table.
    names = {bool: "true or false", int: "a whole number", float: "a number", list: "a list"}
    return names.get(type(default))


def _fits(value: Any, default: Any) -> bool:
    if isinstance(value, bool):
        return isinstance(default, bool)
    return isinstance(value, (int, float) if isinstance(default, float) else type(default))


@contextmanager
def blamed_on(section: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Turn errors that a value of the wrong type causes in a constructor into a ValueError that names the section."""
    try:
        yield
    except (TypeError, AttributeError, RuntimeError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ValueError(f"[{section}] does not work with {given}: {error}") from error


def check_likelihood(likelihood: Any, dataset: Dataset) -> None:
    """Raise ValueError if the likelihood does not fit the targets."""
    kind = likelihood_kind(likelihood)
    if not isinstance(kind, str) or kind not in LIKELIHOODS:
        return  # raised when it is built
    advice = "Leave likelihood out: the default fits the data."
    if LIKELIHOODS[kind].task != dataset.task:
        hint = " For classes in a table set data.task=classification." if dataset.classes is None else ""
        raise ValueError(
            f"likelihood={kind} is for {LIKELIHOODS[kind].task}, the data for {dataset.task}. {advice}{hint}"
        )
    if kind == "bernoulli" and dataset.classes != 2:
        raise ValueError(f"likelihood=bernoulli is for two classes, but the data have {dataset.classes}. {advice}")


def likelihood_kind(likelihood: Any) -> Any:
    """The name of a likelihood given by name or as a table."""
    return likelihood.get("kind", "categorical") if isinstance(likelihood, Mapping) else likelihood
