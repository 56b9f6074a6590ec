"""Keyword arguments that a function does not take: an error that names the nearest one, and all that are possible."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from credo.core.errors import unknown

P = ParamSpec("P")
R = TypeVar("R")
# What other libraries call it, where the spelling is not near.
ELSEWHERE = {
    **dict.fromkeys(("samples", "num_samples", "n_samples", "mc_samples", "sample_nbr"), "draws"),
    **dict.fromkeys(("n_epochs", "num_epochs", "max_epochs", "nb_epochs"), "epochs"),
    "learning_rate": "lr",
    "dataloader": "loader",
    "train_loader": "loader",
    "time": "budget",
}


def checked_keywords(*passed_to: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that a keyword argument that it does not take is a TypeError with the nearest one.

    Args:
        passed_to: Functions that get what the function takes as `**options`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = [name for each in (function, *passed_to) for name in keyword_names(each)]
        known, name = frozenset(names), getattr(function, "__name__", "function")

        @wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            if not known.issuperset(options):
                check_keywords(name, options, known)
            return function(*args, **options)

        return call

    return decorate


def keyword_names(function: Callable[..., Any]) -> list[str]:
    """Arguments that can be given by name.

    Args:
        function: A function.
    """
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def check_keywords(owner: str, given: Iterable[str], possible: Collection[str]) -> None:
    """Raise TypeError for the first name that is not possible.

    Args:
        owner: What is called.
        given: Names of keyword arguments.
        possible: Those that it takes.
    """
    for name in given:
        if name not in possible:
            meant = ELSEWHERE.get(name)
            raise TypeError(unknown(f"argument of {owner}", name, possible, meant if meant in possible else None))
