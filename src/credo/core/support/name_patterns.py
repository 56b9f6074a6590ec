"""Select names by glob."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable

from credo.core.errors import unknown


def matches(name: str, pattern: str, names: Collection[str]) -> bool:
    """Return whether `pattern` matches `name`; a pattern that is itself one of `names` matches only that one."""
    return name == pattern if pattern in names else fnmatch.fnmatchcase(name, pattern)


def chosen_names(names: Collection[str], patterns: Iterable[str], what: str) -> list[str]:
    """Return the names that match any pattern, in their own order.

    Args:
        names: The names to choose from.
        patterns: Names or globs.
        what: What a pattern is, for the ValueError if one matches nothing.
    """
    patterns = list(patterns)
    for pattern in patterns:
        if not any(matches(name, pattern, names) for name in names):
            raise ValueError(unknown(what, pattern, names))
    return [name for name in names if any(matches(name, pattern, names) for pattern in patterns)]
