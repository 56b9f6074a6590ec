"""Accept names of arguments and methods of 0.1 until 0.3."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, ParamSpec, TypeVar

from credo.core.support.user_warnings import warn

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
                    warn(text, DeprecationWarning)
                    options[new] = options.pop(old)
            return function(*args, **options)

        return call

    return decorate


class RenamedMethods:
    """Methods of posteriors under their names of 0.1, for callers and for subclasses that override them."""

    _renamed_methods: ClassVar[dict[str, str]] = {"draws": "iter_draws", "noise": "activation_noise"}

    def __init_subclass__(cls, **options: Any) -> None:
        """Let a subclass that overrides a method by its old name override the new one."""
        super().__init_subclass__(**options)
        for old, new in cls._renamed_methods.items():
            if old in cls.__dict__ and new not in cls.__dict__:
                _warn(f"{cls.__name__}.{old}", new)
                setattr(cls, new, cls.__dict__[old])

    def draws(self, count: int) -> Any:
        """`iter_draws` under its old name."""
        _warn("draws", "iter_draws")
        return getattr(self, "iter_draws")(count)  # noqa: B009

    def noise(self) -> Any:
        """`activation_noise` under its old name."""
        _warn("noise", "activation_noise")
        return getattr(self, "activation_noise")()  # noqa: B009


def _warn(old: str, new: str) -> None:
    text = f"The method {old}() is now {new}(); the old name goes in 0.3."
    warn(text, DeprecationWarning)
