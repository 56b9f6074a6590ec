"""Constructor arguments: recorded when an object is made, and written as JSON."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np

from credo.core.network.references import NotFollowed


class Arguments(NotFollowed, dict[str, Any]):
    """Constructor arguments by name. Private copies of a posterior share them, with the network that is among them."""


def recorded(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor so that the object has its arguments, with defaults, as `self.arguments`.

    Of constructors that call each other the outermost counts: a subclass's own.

    Args:
        init: An `__init__`.
    """
    signature = inspect.signature(init)

    @wraps(init)
    def wrapper(self: Any, *args: Any, **options: Any) -> None:
        if "arguments" not in self.__dict__:
            bound = signature.bind(self, *args, **options)
            bound.apply_defaults()
            given = dict(list(bound.arguments.items())[1:])
            for name, parameter in signature.parameters.items():
                if parameter.kind is parameter.VAR_KEYWORD:
                    given.update(given.pop(name))
            self.__dict__["arguments"] = Arguments(given)
        init(self, *args, **options)

    return wrapper


def as_json(value: Any) -> Any:
    """An argument as JSON: objects by their `config()`; functions, which a file cannot hold, as None.

    Args:
        value: A number, text, sequence or mapping of such, a dataclass, or an object with `config()`.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if hasattr(value, "config"):
        return value.config()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {key: as_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return None
