"""The errors that Credo raises itself, and the wording they share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CredoError(Exception):
    """Base of all errors that are Credo's own."""


class UnsupportedModelError(CredoError, ValueError):
    """The network cannot be used as asked; the message lists every problem found."""


class NonFiniteError(CredoError, ArithmeticError):
    """Something is NaN or infinite: a loss or gradient, with parameters still the last good ones, or a prediction."""


class DivergenceWarning(UserWarning):
    """Training goes astray, though all its numbers are finite: the message names the arguments to change."""


class LostProcessError(CredoError, RuntimeError):
    """Another process of the group was lost, or did not answer in time; parameters are those of the last step."""


class FileFormatError(CredoError, ValueError):
    """A saved file is truncated, changed, of another version, or of another architecture."""


def unknown(kind: str, given: str, possible: Iterable[str]) -> str:
    """Message for a name that does not exist: what was given, the nearest valid one, all that is possible."""
    names = sorted(possible)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"Unknown {kind} {given!r}.{hint} Possible: {', '.join(names)}."
