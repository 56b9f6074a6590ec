"""Accept argument names of 0.1 until 0.3."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed_arguments(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that it takes old keyword arguments, with a DeprecationWarning: `old="new"`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            for old, new in names.items():
                if old in options:
                    if new in options:
                        raise TypeError(f"{function.__name__}() got both {old}= and {new}=, which is its new name.")
                    text = f"{function.__name__}({old}=…) is now {new}=…; the old name goes in 0.3."
                    warnings.warn(text, DeprecationWarning, stacklevel=2)
                    options[new] = options.pop(old)
            return function(*args, **options)

        return call

    return decorate
