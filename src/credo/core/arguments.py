"""Constructor arguments: groups of them, old names, and their record, which is written as JSON."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar, Self

import numpy as np

from credo.core.errors import unknown
from credo.core.network.references import NotFollowed
from credo.core.support.keywords import check_keywords
from credo.core.support.user_warnings import warn


class Arguments(NotFollowed, dict[str, Any]):
    """Constructor arguments by name. Private copies of a posterior share them, with the network that is among them."""


# -- groups ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Group:
    """Constructor arguments that belong together, given as one: an instance, a mapping of its fields, or a short form.

    A subclass is a frozen dataclass that validates its fields in `__post_init__`.
    """

    argument: ClassVar[str]
    """Name of the constructor's argument."""
    short: ClassVar[str]
    """The field that a value which is neither an instance nor a mapping stands for."""

    @classmethod
    def of(cls, given: Any) -> Self:
        """The group from an instance, a mapping of fields (as TOML gives it), or the value of the field `short`."""
        if isinstance(given, cls):
            return given
        if isinstance(given, Group):
            raise ValueError(
                f"{cls.argument}={given!r} must be of the class {cls.__name__}, or a mapping of its fields."
            )
        return cls(**cls.given_fields(given))

    @classmethod
    def given_fields(cls, given: Any) -> dict[str, Any]:
        """The fields that are given, by name; raises ValueError for one that does not exist."""
        if isinstance(given, Group):
            return {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
        if not isinstance(given, Mapping):
            return {cls.short: given}
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(unknown(f"field of {cls.argument}", str(name), known))
        return dict(given)

    @classmethod
    def completed(cls, given: Any) -> dict[str, Any]:
        """All fields as JSON-able values, with defaults where none is given; they are not validated yet."""
        defaults = {field.name: getattr(cls(), field.name) for field in dataclasses.fields(cls)}
        return {name: as_json(value) for name, value in {**defaults, **cls.given_fields(given)}.items()}

    def config(self) -> dict[str, Any]:
        """The fields as JSON-able values."""
        return {field.name: as_json(getattr(self, field.name)) for field in dataclasses.fields(self)}


def group_of(parameter: inspect.Parameter | None) -> type[Group] | None:
    """The group that an argument of a constructor stands for, known by its default; None if it is no group."""
    default = None if parameter is None else parameter.default
    return type(default) if isinstance(default, Group) else None


def argument_names(cls: type) -> list[str]:
    """Names of a constructor's arguments, and `group.field` for the fields of groups."""
    parameters = inspect.signature(cls).parameters
    fields = [
        f"{name}.{field.name}"
        for name, parameter in parameters.items()
        if (kind := group_of(parameter)) is not None
        for field in dataclasses.fields(kind)
    ]
    return [*parameters, *fields]


# -- old names -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Replaced:
    """What became of an argument of a constructor that another one replaces in a way of its own.

    Attributes:
        by: The new form, for messages.
        place: `place(arguments, value)` puts the value into the other arguments.
        until: The version in which the old name goes; None: it stays as another form of the new one.
    """

    by: str
    place: Callable[[dict[str, Any], Any], None]
    until: str | None = "0.3"


# Old name: "new", "group.field", or what to do.
Renamed = Mapping[str, str | Replaced]


@dataclasses.dataclass(frozen=True)
class OldName:
    """An old name that was given: its new one in Python, and as a key below [method] in TOML."""

    old: str
    python: str
    key: str
    until: str


def current_arguments(cls: type, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[OldName]]:
    """Arguments of a constructor by their names of this version, and the old names among them that will go.

    Args:
        cls: The class; its `_renamed_arguments` say what became of old names.
        given: Arguments by name, also old ones.
    """
    rules: Renamed = getattr(cls, "_renamed_arguments", {})
    parameters = inspect.signature(cls).parameters
    current = {name: value for name, value in given.items() if name not in rules}
    found = []
    for name, rule in rules.items():
        if name not in given:
            continue
        if not isinstance(rule, Replaced):
            found.append(OldName(name, _place(cls, parameters, current, name, rule, given[name]), rule, "0.3"))
            continue
        rule.place(current, given[name])
        if rule.until is not None:
            found.append(OldName(name, rule.by, rule.by, rule.until))
    return current, found


def _place(
    cls: type, parameters: Mapping[str, inspect.Parameter], current: dict[str, Any], old: str, new: str, value: Any
) -> str:
    """Put the value of an old argument into the current ones; returns the new form."""
    name, _, field = new.partition(".")
    kind = group_of(parameters.get(name))
    before = {} if name not in current else {"": current[name]} if kind is None else kind.given_fields(current[name])
    if field in before:
        raise TypeError(f"{cls.__name__}() got both {old}= and {new}, which is its new name.")
    current[name] = value if kind is None else {**before, field: value}
    return f"{name}=…" if kind is None else f"{name}=credo.{kind.__name__}({field}=…)"


def current_config(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """What `config()` wrote in this or an earlier version, in the form of this version.

    Args:
        cls: The class of the posterior.
        options: The arguments that were written.
    """
    return {name: as_json(value) for name, value in whole_groups(cls, current_arguments(cls, options)[0]).items()}


def merged(cls: type, options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with some of them changed; of a group, a mapping or a short form changes only the fields it names.

    Args:
        cls: The class of the posterior.
        options: Arguments by their current names.
        changes: Those that change, by their current names.
    """
    parameters, result = inspect.signature(cls).parameters, dict(options)
    for name, value in changes.items():
        kind = group_of(parameters.get(name))
        if kind is None or isinstance(value, Group) or name not in result:
            result[name] = value
        else:
            result[name] = {**kind.given_fields(result[name]), **kind.given_fields(value)}
    return result


def whole_groups(cls: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their current names with every group as an instance, whatever form it was given in.

    Args:
        cls: The class whose constructor takes them.
        arguments: The arguments.
    """
    parameters = inspect.signature(cls).parameters
    kinds = {name: group_of(parameters.get(name)) for name in arguments}
    return {name: value if (kind := kinds[name]) is None else kind.of(value) for name, value in arguments.items()}


# -- the record ------------------------------------------------------------------------------------------------------


def recorded(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor so that the object has its arguments, with defaults, as `self.arguments`.

    Of constructors that call each other the outermost counts: a subclass's own. Old names are accepted, with a
    DeprecationWarning.

    Args:
        init: An `__init__`.
    """
    signature = inspect.signature(init)

    @wraps(init)
    def wrapper(self: Any, *args: Any, **options: Any) -> None:
        if "arguments" not in self.__dict__:
            cls = type(self)
            options, found = current_arguments(cls, options)
            for one in found:
                text = f"{cls.__name__}({one.old}=…) is now {one.python}; the old name goes in {one.until}."
                warn(text, DeprecationWarning)
            _check_names(cls, signature, options)
            try:
                bound = signature.bind(self, *args, **options)
            except TypeError as error:
                raise TypeError(f"{cls.__name__}: {error}{_needed(signature, args, options)}.") from None
            bound.apply_defaults()
            given = dict(list(bound.arguments.items())[1:])
            for name, parameter in signature.parameters.items():
                if parameter.kind is parameter.VAR_KEYWORD:
                    given.update(given.pop(name))
            self.__dict__["arguments"] = Arguments(whole_groups(cls, given))
        init(self, *args, **options)

    return wrapper


def _needed(signature: inspect.Signature, args: Sequence[Any], options: Mapping[str, Any]) -> str:
    """What to write where the argument that every method needs is missing."""
    if "data_size" not in signature.parameters or "data_size" in options or len(args) != 1:
        return ""
    return ". Give the number of training examples, such as data_size=len(dataset)"


def _check_names(cls: type, signature: inspect.Signature, options: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument that the constructor does not take."""
    parameters = signature.parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    check_keywords(cls.__name__, options, [known for known in parameters if known != "self"])


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
