"""What the processes of one training must do alike: read one file, write it once, fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from credo.core.errors import CredoError
from credo.core.team import Team

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
