"""What ranks must do together: rank 0 reads and writes files, and all fail if one fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from credo.core.distributed.process_group import ProcessGroup
from credo.core.errors import CredoError

Value = TypeVar("Value")


def several(process_group: ProcessGroup | None) -> bool:
    """Return whether there is more than one process."""
    return process_group is not None and process_group.world > 1


def is_first(process_group: ProcessGroup | None) -> bool:
    """Return whether this process is rank 0, which writes files and prints."""
    return process_group is None or process_group.is_first


def first_does(process_group: ProcessGroup | None, action: Callable[[], Value]) -> Value | None:
    """Run `action` on rank 0; return its result there, None on the others, which wait. If it fails, all ranks raise.

    It must take less than the process group's timeout.
    """
    if process_group is None or not several(process_group):
        return action()
    value: Value | None = None
    failure: Exception | None = None
    if process_group.is_first:
        try:
            value = action()
        except Exception as error:  # whatever it is, the other processes must not wait for this one
            failure = error
    if process_group.agree(failure is not None):
        raise failure or CredoError("The first process (rank 0) failed, see its error; this one stops with it.")
    return value


def from_first(process_group: ProcessGroup | None, value: Value) -> Value:
    """Broadcast rank 0's value."""
    found: Value = value if process_group is None else process_group.share(value)
    return found


def all_do(process_group: ProcessGroup | None, action: Callable[[], None]) -> None:
    """Run `action` on every rank; if it fails on one, all raise."""
    if process_group is None or not several(process_group):
        action()
        return
    failure: Exception | None = None
    try:
        action()
    except Exception as error:  # whatever it is, as in `first_does`
        failure = error
    if process_group.agree(failure is not None):
        raise failure or CredoError("Another process failed, see its error; this one stops with it.")


def check_alike(process_group: ProcessGroup | None, options: dict[str, Any]) -> None:
    """Raise ValueError on all ranks if their options differ, with the names that differ."""
    if process_group is None or not several(process_group):
        return
    first: dict[str, Any] = process_group.share(options)
    fractions = process_group.average_([], [float(first.get(name) != value) for name, value in options.items()])
    different = [name for name, fraction in zip(options, fractions, strict=True) if fraction > 0]
    if different:
        here = "; ".join(f"{name}: {options[name]!r} here, {_elsewhere(first, options, name)}" for name in different)
        raise ValueError(
            f"The processes ask for different trainings ({here}). Give {' and '.join(different)} alike to all."
        )


def _elsewhere(first: dict[str, Any], options: dict[str, Any], name: str) -> str:
    found = first.get(name)
    return "another value in another process" if found == options[name] else f"{found!r} in process 0"
