"""Options of data, network and method: their defaults, written out, and type checks.

Defaults are recorded because a later version may have others. Options that an experiment fills in itself (sizes, seeds)
are left out.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from credo.core.arguments import Group, as_json, current_arguments, group_of
from credo.core.likelihood import LIKELIHOODS
from credo.core.posterior import Posterior
from credo.data import Dataset
from credo.data.registry import find_spec
from credo.methods import METHODS, Ensemble
from credo.models.own import OWN, is_own
from credo.models.registry import OFFERED, model_options

_MEMBERS = 5
# Filled in by the experiment.
_FOR_METHODS = {"self", "model", "data_size"}
# TOML has no null.
NONE = "none"
# Value of model.normalize: mean and standard deviation of the training inputs.
AUTO = "auto"
# Likelihoods whose targets have units of their own: whole numbers from 0, positive times, 0 or 1.
_OWN_UNITS = ("poisson", "negative-binomial", "censored-times", "multi-label")
Options = Mapping[str, inspect.Parameter]


def data_with_defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """The [data] section with every option of its data set; raises on an unknown name."""
    parameters = inspect.signature(find_spec(table["name"]).load).parameters
    return _completed(table, {key: p for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY})


def model_with_defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] section with every option of its network; inputs are normalised by their statistics by default.

    Defaults of a network of the user's own are in its code.
    """
    if is_unknown_code(table["name"]):
        return dict(table)
    options = model_options(table["name"])
    if "normalize" in options:
        table = {"normalize": AUTO, **table}
    completed = dict(table) if is_own(table["name"]) else _completed(table, options, without=OFFERED)
    normalize = completed.get("normalize")
    if isinstance(normalize, str) and normalize != AUTO:
        raise ValueError(
            f"model.normalize={normalize!r}: possible are auto (mean and standard deviation of the training inputs), "
            "none, or [mean, std], numbers or one for each channel."
        )
    return completed


def is_unknown_code(name: object) -> bool:
    """Whether a network is named by its code, which nobody has asked to run: its options cannot be known."""
    return is_own(name) and name not in OWN


def own_normalize(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an experiment, with the network's own default if they lack `model.normalize`.

    This is what it meant in records and recipes from before there was `"auto"`.
    """
    model = tables.get("model", {})
    name = model.get("name", "mlp") if isinstance(model, Mapping) else None
    option = model_options(name).get("normalize") if isinstance(name, str) and not is_own(name) else None
    if option is None:  # what is wrong is raised when the experiment is made
        return dict(tables)
    return {**tables, "model": {"normalize": json.loads(json.dumps(option.default)), **model}}


def method_with_defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """The [method] section with every option of its constructor, for an ensemble also those of the members."""
    if METHODS[table["name"]] is Ensemble:
        of = method_with_defaults({"name": "map", **table.get("of", {})})
        return {"name": table["name"], "members": _MEMBERS, **table, "of": of}
    whole = _completed(table, method_options(table["name"]), without={"seed"})
    rates = getattr(METHODS[table["name"]], "rates_by_update", None)
    return {**whole, "lr": rates.get(whole["update"])} if rates and whole["lr"] is None else whole


def method_options(name: str) -> dict[str, inspect.Parameter]:
    """Arguments of a method's constructor, except those that an experiment fills in."""
    if METHODS[name] is Ensemble:  # its constructor takes finished members
        options = {"members": _MEMBERS, "of": {"name": "map"}}
        return {key: inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=v) for key, v in options.items()}
    parameters = inspect.signature(METHODS[name]).parameters
    return {key: p for key, p in parameters.items() if key not in _FOR_METHODS}


def current_table(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The [method] section with the names of this version, and a note about each old name in it."""
    if not _is_method(table):
        return dict(table), []
    cls = METHODS[table["name"]]
    try:
        current, found = current_arguments(cls, _in_values(table, getattr(cls, "_renamed_arguments", ())))
    except TypeError as error:
        raise ValueError(f"[method]: {error}") from error
    notes = [f"method.{one.old} is now method.{one.key}; the old name goes in {one.until}." for one in found]
    if cls is Ensemble and isinstance(table.get("of"), Mapping):
        of, more = current_table({"name": "map", **table["of"]})
        return {**current, "of": of}, notes + more
    return current, notes


def _in_values(table: Mapping[str, Any], old: Collection[str]) -> dict[str, Any]:
    """The [method] section as 0.1 meant it: its run folders hold every option, many of them as `"none"`.

    No prior of a method with curvature was N(0, 1) there, and is chosen by `fit` now.
    """
    found = {key: None if key in old and value == NONE else value for key, value in table.items()}
    priors = [found[key] for key in ("prior", "prior_precision", "weight_decay") if key in found]
    if "curvature_decay" in found and priors and all(value in (None, NONE) for value in priors):
        found["prior"] = 1.0
    return found


def with_batches(method: type[Posterior], options: Mapping[str, Any], batches: int) -> dict[str, Any]:
    """Arguments of a constructor in which a KL term knows the number of batches of an epoch, unless it is given."""
    kind = group_of(inspect.signature(method).parameters.get("kl_term"))
    if kind is None:
        return dict(options)
    fields = kind.given_fields(options.get("kl_term", {}))
    return {**options, "kl_term": fields if fields.get("batches") is not None else {**fields, "batches": batches}}


def means_none(value: Any, option: inspect.Parameter | None) -> bool:
    """Whether an option that may be None is given as None or `"none"`."""
    if value not in (None, NONE) or option is None:
        return False
    return any(word in str(option.annotation) for word in ("None", "Optional"))


def in_words(table: Mapping[str, Any]) -> dict[str, Any]:
    """A section for TOML, with `"none"` for None, also in groups of a method's options."""
    groups = (
        {key for key, p in method_options(table["name"]).items() if group_of(p)} if _is_method(table) else set[str]()
    )
    nested = {key: in_words(table[key]) for key in table if key in {"of", *groups} and isinstance(table[key], Mapping)}
    return {key: NONE if value is None else value for key, value in {**table, **nested}.items()}


def _is_method(table: Mapping[str, Any]) -> bool:
    return isinstance(table.get("name"), str) and table["name"] in METHODS


def _completed(table: Mapping[str, Any], options: Options, without: Collection[str] = ()) -> dict[str, Any]:
    """The table with the defaults of options that it does not give, as JSON values."""
    given = {key: None if means_none(value, options.get(key)) else value for key, value in table.items()}
    known = {key: p.default for key, p in options.items() if key not in without and p.default is not p.empty}
    whole = {"name": table["name"], **json.loads(json.dumps(as_json(known))), **given}
    return {key: _completed_group(group_of(options.get(key)), value) for key, value in whole.items()}


def _completed_group(kind: type[Group] | None, given: Any) -> Any:
    """All fields of a group, but for the number of batches, which an experiment fills in."""
    if kind is None:
        return given
    may_be_none = {field.name for field in fields(kind) if "None" in str(field.type)}
    named = kind.given_fields(given)
    named = {key: None if value == NONE and key in may_be_none else value for key, value in named.items()}
    if named.pop("batches", None) is not None:
        raise ValueError("method.kl_term.batches: leave it out. An experiment knows its number of batches.")
    return {key: v for key, v in kind.completed(named).items() if key != "batches"}


# -- type checks -----------------------------------------------------------------------------------------------------


def check_types(
    section: str, options: Mapping[str, Any], defaults: Mapping[str, Any], alike: Mapping[str, Any] | None = None
) -> None:
    """Raise ValueError if one of the `options` of a `section` does not have the type of its `defaults`.

    Only where the default is a number, boolean or list.

    Args:
        section: Name of the section.
        options: Values by name.
        defaults: Their defaults.
        alike: For options whose default is None: a value of their type.
    """
    for key, value in options.items():
        default = (alike or {}).get(key, defaults.get(key))
        default = default.get("*") if isinstance(default, Mapping) else default  # numbers by parameter name globs
        wanted = _wanted(default)
        # Values by name and groups of their own are tables; the constructor validates them.
        if wanted and not isinstance(value, Mapping) and not _fits(value, default):
            shown = NONE if defaults[key] is None else repr(defaults[key])
            raise ValueError(f"{section}.{key}={value!r} must be {wanted}; the default is {shown}.")


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
    if kind in _OWN_UNITS and dataset.target_mean is not None:
        raise ValueError(f"likelihood={kind} needs targets that are not standardised: leave out data.standardise.")
    if kind == "multi-label" and (dataset.classes is not None or dataset.train.y.shape[1] < 2):
        raise ValueError(
            "likelihood=multi-label needs 0 or 1 for each of several labels: an .npz file with y [rows, labels]."
        )
    if kind == "censored-times" and (dataset.classes is not None or dataset.train.y.shape[1] != 2):
        raise ValueError(
            "likelihood=censored-times needs a time, and whether it was observed: an .npz file with y [rows, 2]."
        )
    advice = "Leave likelihood out: the default fits the data."
    if data_task(kind) != dataset.task:
        hint = " For classes in a table set data.task=classification." if dataset.classes is None else ""
        raise ValueError(f"likelihood={kind} is for {data_task(kind)}, the data for {dataset.task}. {advice}{hint}")
    if kind == "bernoulli" and dataset.classes != 2:
        raise ValueError(f"likelihood=bernoulli is for two classes, but the data have {dataset.classes}. {advice}")


def data_for_likelihood(data: Mapping[str, Any], method: Mapping[str, Any]) -> dict[str, Any]:
    """The [data] section with what the likelihood of a method means for targets, where it is left open.

    Counts, times and labels are not standardised; numbers are classes if the likelihood is one of classes.

    Args:
        data: The [data] section, with what was given.
        method: The [method] section.
    """
    one = method.get("of", {}) if method.get("name") == "ensemble" else method
    kind = likelihood_kind(one.get("likelihood")) if isinstance(one, Mapping) else None
    options = inspect.signature(find_spec(data["name"]).load).parameters
    if not isinstance(kind, str) or kind not in LIKELIHOODS:
        return dict(data)
    chosen: dict[str, Any] = {}
    if "standardise" in options and kind in _OWN_UNITS:
        chosen["standardise"] = "inputs"
    if "task" in options and data.get("task", "auto") == "auto":
        chosen["task"] = data_task(kind)
    return {**data, **{key: value for key, value in chosen.items() if data.get(key, "auto") == "auto"}}


def data_task(kind: str) -> str:
    """Whether targets of a likelihood are classes, one for each row; all others are numbers."""
    return "classification" if LIKELIHOODS[kind].task == "classification" else "regression"


def likelihood_for(likelihood: Any, dataset: Dataset) -> Any:
    """A likelihood with the number of classes of the data, where it needs it."""
    if likelihood_kind(likelihood) != "ordinal" or dataset.classes is None:
        return likelihood
    return {"classes": dataset.classes, **(likelihood if isinstance(likelihood, Mapping) else {"kind": "ordinal"})}


def likelihood_kind(likelihood: Any) -> Any:
    """The name of a likelihood given by name or as a table."""
    return likelihood.get("kind", "categorical") if isinstance(likelihood, Mapping) else likelihood
