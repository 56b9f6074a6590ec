"""Defaults of data, network and method, written out: a later version may have others, and a record keeps its meaning.

What an experiment fills in by itself (sizes, seeds) is left out: it follows from the rest of the record.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping
from typing import Any

from credo.data.registry import find_spec
from credo.methods import METHODS, Ensemble
from credo.models.registry import model_options

_MEMBERS = 5
# What the experiment fills in by itself.
_FOR_MODELS = {"inputs", "classes", "seed"}
_FOR_METHODS = {"self", "model", "data_size", "batches"}
# TOML has no word of its own for None.
NONE = "none"
Options = Mapping[str, inspect.Parameter]


def data_with_defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """The [data] section with every option of its data set; names that do not exist are refused."""
    parameters = inspect.signature(find_spec(table["name"]).load).parameters
    return _completed(table, {key: p for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY})


def model_with_defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] section with every option of its network."""
    return _completed(table, model_options(table["name"]), without=_FOR_MODELS)


def method_with_defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """The [method] section with every option of its constructor, and of the members' for an ensemble."""
    if METHODS[table["name"]] is Ensemble:
        of = method_with_defaults({"name": "map", **table.get("of", {})})
        return {"name": table["name"], "members": _MEMBERS, **table, "of": of}
    return _completed(table, method_options(table["name"]), without={"seed"})


def method_options(name: str) -> dict[str, inspect.Parameter]:
    """What a method's constructor takes, beyond what an experiment fills in."""
    if METHODS[name] is Ensemble:  # its constructor takes finished members; an experiment says how to make them
        options = {"members": _MEMBERS, "of": {"name": "map"}}
        return {key: inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=v) for key, v in options.items()}
    parameters = inspect.signature(METHODS[name]).parameters
    return {key: p for key, p in parameters.items() if key not in _FOR_METHODS}


def means_none(value: Any, option: inspect.Parameter | None) -> bool:
    """Whether an option that may be None is given as such, or as `"none"`."""
    if value not in (None, NONE) or option is None:
        return False
    return any(word in str(option.annotation) for word in ("None", "Optional"))


def in_words(table: Mapping[str, Any]) -> dict[str, Any]:
    """A section as TOML can hold all of it."""
    nested = {key: in_words(value) for key, value in table.items() if key == "of"}
    return {key: NONE if value is None else value for key, value in {**table, **nested}.items()}


def _completed(table: Mapping[str, Any], options: Options, without: Collection[str] = ()) -> dict[str, Any]:
    """The table with the defaults of options that it does not give, as a JSON file holds them."""
    given = {key: None if means_none(value, options.get(key)) else value for key, value in table.items()}
    known = {key: p.default for key, p in options.items() if key not in without and p.default is not p.empty}
    return {"name": table["name"], **json.loads(json.dumps(known)), **given}
