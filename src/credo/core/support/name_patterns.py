"""Choosing by name or glob."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable

from credo.core.errors import unknown


def matches(name: str, pattern: str, names: Collection[str]) -> bool:
    """Whether `pattern` means this one of `names`; one that is a name itself (`"conv[3x3]"`) means no other."""
    return name == pattern if pattern in names else fnmatch.fnmatchcase(name, pattern)


def chosen_names(names: Collection[str], patterns: Iterable[str], what: str) -> list[str]:
    """The names that any of the patterns means, in their own order; `what` names a pattern that means none."""
    patterns = list(patterns)
    for pattern in patterns:
        if not any(matches(name, pattern, names) for name in names):
            raise ValueError(unknown(what, pattern, names))
    return [name for name in names if any(matches(name, pattern, names) for pattern in patterns)]
