"""What the processes of one training must do alike: read one file, write it once, fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from credo.core.distributed.process_group import ProcessGroup
from credo.core.errors import CredoError

Value = TypeVar("Value")


def several(process_group: ProcessGroup | None) -> bool:
    """Whether there is anybody to agree with."""
    return process_group is not None and process_group.world > 1


def is_first(process_group: ProcessGroup | None) -> bool:
    """Whether this process is the one that writes and speaks."""
    return process_group is None or process_group.is_first


def first_does(process_group: ProcessGroup | None, action: Callable[[], Value]) -> Value | None:
    """What `action` gives on the first process, None on the others, which wait for it; if it fails, all of them fail.

    Not for more than the process group's timeout: those who wait take it for lost then.
    """
    if process_group is None or not several(process_group):
        return action()
    value: Value | None = None
    failure: Exception | None = None
    if process_group.is_first:
        try:
            value = action()
        except Exception as error:
            failure = error
    if process_group.agree(failure is not None):
        raise failure or CredoError("The first process (rank 0) failed and said why; this one stops with it.")
    return value


def from_first(process_group: ProcessGroup | None, value: Value) -> Value:
    """The value that the first process has, on all of them."""
    found: Value = value if process_group is None else process_group.share(value)
    return found


def all_do(process_group: ProcessGroup | None, action: Callable[[], None]) -> None:
    """Every process does it; if it fails for one, all of them fail."""
    if process_group is None or not several(process_group):
        action()
        return
    failure: Exception | None = None
    try:
        action()
    except Exception as error:
        failure = error
    if process_group.agree(failure is not None):
        raise failure or CredoError("Another process failed and said why; this one stops with it.")


def check_alike(process_group: ProcessGroup | None, wishes: dict[str, Any]) -> None:
    """Refuse, for all processes, to do what they do not all want alike; the names of what differs are in the error."""
    if process_group is None or not several(process_group):
        return
    first: dict[str, Any] = process_group.share(wishes)
    shares = process_group.average_([], [float(first.get(name) != value) for name, value in wishes.items()])
    different = [name for name, share in zip(wishes, shares, strict=True) if share > 0]
    if different:
        here = "; ".join(f"{name}: {wishes[name]!r} here, {_elsewhere(first, wishes, name)}" for name in different)
        raise ValueError(
            f"The processes ask for different trainings ({here}). Give {' and '.join(different)} alike to all."
        )


def _elsewhere(first: dict[str, Any], wishes: dict[str, Any], name: str) -> str:
    found = first.get(name)
    return "another value in another process" if found == wishes[name] else f"{found!r} in process 0"
