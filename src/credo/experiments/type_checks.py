"""Values of the wrong kind, refused by name: deeper down they would fail obscurely or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from credo.core.likelihood import LIKELIHOODS
from credo.data import Dataset


def check_kinds(section: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse a value that is not of its default's kind, where that is a number, a yes/no or a list."""
    for key, value in options.items():
        wanted = _wanted(defaults.get(key))
        if wanted and not _fits(value, defaults[key]):
            raise ValueError(f"{section}.{key}={value!r} must be {wanted}; the default is {defaults[key]!r}.")


def _wanted(default: Any) -> str | None:
    # Texts are left out: many of them stand for something that may also be given as a number, a list or a table.
    names = {bool: "true or false", int: "a whole number", float: "a number", list: "a list"}
    return names.get(type(default))


def _fits(value: Any, default: Any) -> bool:
    if isinstance(value, bool):
        return isinstance(default, bool)
    return isinstance(value, (int, float) if isinstance(default, float) else type(default))


@contextmanager
def blamed_on(section: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Errors that a value of the wrong kind causes in a constructor, said of the section that holds it."""
    try:
        yield
    except (TypeError, AttributeError, RuntimeError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ValueError(f"[{section}] does not work with {given}: {error}") from error


def check_likelihood(likelihood: Any, dataset: Dataset) -> None:
    """Refuse one that is not for the data's targets, before anything is trained with it."""
    kind = likelihood_kind(likelihood)
    if not isinstance(kind, str) or kind not in LIKELIHOODS:
        return  # whoever builds it says so
    advice = "Leave likelihood out: the one that fits the data is the default."
    if LIKELIHOODS[kind].task != dataset.task:
        hint = " For classes in a table set data.task=classification." if dataset.classes is None else ""
        raise ValueError(
            f"likelihood={kind} is for {LIKELIHOODS[kind].task}, the data for {dataset.task}. {advice}{hint}"
        )
    if kind == "bernoulli" and dataset.classes != 2:
        raise ValueError(
            f"likelihood=bernoulli is for two classes, yes or no; the data have {dataset.classes}. {advice}"
        )


def likelihood_kind(likelihood: Any) -> Any:
    """The name in a likelihood's description, which may be the name alone."""
    return likelihood.get("kind", "categorical") if isinstance(likelihood, Mapping) else likelihood
