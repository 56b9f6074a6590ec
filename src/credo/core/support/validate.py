"""Validate numeric arguments: numbers, counts (draws, steps, examples), seeds."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, SupportsInt

from torch import Tensor


def is_count(value: Any, *, least: int = 1) -> bool:
    """Return whether `value` (int, NumPy or torch number, 3.0) is a whole number, at least `least`."""
    if isinstance(value, int):  # math.isfinite overflows on large ones
        return value >= least and not isinstance(value, bool)
    if isinstance(value, str) or not isinstance(value, SupportsInt):
        return False
    return math.isfinite(value) and int(value) == value and value >= least  # type: ignore[arg-type]


def checked_count(name: str, value: Any, *, least: int = 1, what: str = "") -> int:
    """Return `value` as an int.

    Args:
        name: Name of the argument, for the message.
        value: The argument.
        least: Smallest valid count.
        what: What is counted, for the message.

    Raises:
        ValueError: If it is not a whole number, at least `least`.
    """
    if not is_count(value, least=least):
        raise ValueError(f"{name}={value!r} must be a whole number{f' of {what}' if what else ''}, {least} or more.")
    return int(value)


def checked_seed(value: Any) -> int:
    """Return the seed as an int; raise ValueError unless torch's generators accept it."""
    if not is_count(value, least=-(2**63)) or int(value) >= 2**64:
        raise ValueError(f"seed={value!r} must be a whole number from −2⁶³ to 2⁶⁴ − 1.")
    return int(value)


def is_number(value: object) -> bool:
    """Return whether `value` is one real number: no str, list, bool or tensor of several entries."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)
