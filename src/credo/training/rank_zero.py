"""What the processes of one training must do alike: read one file, write it once, fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from credo.core.distributed.process_group import Team
from credo.core.errors import CredoError

Value = TypeVar("Value")


def several(team: Team | None) -> bool:
    """Whether there is anybody to agree with."""
    return team is not None and team.world > 1


def is_first(team: Team | None) -> bool:
    """Whether this process is the one that writes and speaks."""
    return team is None or team.is_first


def first_does(team: Team | None, action: Callable[[], Value]) -> Value | None:
    """What `action` gives on the first process, None on the others, which wait for it; if it fails, all of them fail.

    Not for more than the team's timeout: those who wait take it for lost then.
    """
    if team is None or not several(team):
        return action()
    value: Value | None = None
    failure: Exception | None = None
    if team.is_first:
        try:
            value = action()
        except Exception as error:
            failure = error
    if team.agree(failure is not None):
        raise failure or CredoError("The first process (rank 0) failed and said why; this one stops with it.")
    return value


def from_first(team: Team | None, value: Value) -> Value:
    """The value that the first process has, on all of them."""
    found: Value = value if team is None else team.share(value)
    return found


def all_do(team: Team | None, action: Callable[[], None]) -> None:
    """Every process does it; if it fails for one, all of them fail."""
    if team is None or not several(team):
        action()
        return
    failure: Exception | None = None
    try:
        action()
    except Exception as error:
        failure = error
    if team.agree(failure is not None):
        raise failure or CredoError("Another process failed and said why; this one stops with it.")


def check_alike(team: Team | None, wishes: dict[str, Any]) -> None:
    """Refuse, for all processes, to do what they do not all want alike; the names of what differs are in the error."""
    if team is None or not several(team):
        return
    first: dict[str, Any] = team.share(wishes)
    shares = team.average_([], [float(first.get(name) != value) for name, value in wishes.items()])
    different = [name for name, share in zip(wishes, shares, strict=True) if share > 0]
    if different:
        here = "; ".join(f"{name}: {wishes[name]!r} here, {_elsewhere(first, wishes, name)}" for name in different)
        raise ValueError(
            f"The processes ask for different trainings ({here}). Give {' and '.join(different)} alike to all."
        )


def _elsewhere(first: dict[str, Any], wishes: dict[str, Any], name: str) -> str:
    found = first.get(name)
    return "another value in another process" if found == wishes[name] else f"{found!r} in process 0"
