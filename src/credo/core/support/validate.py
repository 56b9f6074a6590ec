"""Whether an argument is a number; a whole one where it says how many (draws, steps, examples); a seed."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, SupportsInt

from torch import Tensor


def is_count(value: Any, *, least: int = 1) -> bool:
    """Whether a number of any kind (NumPy's, torch's, 3.0) is whole and at least `least`."""
    if isinstance(value, bool | str) or not isinstance(value, SupportsInt):
        return False
    if isinstance(value, int):  # of any size, which math.isfinite does not take
        return value >= least
    return math.isfinite(value) and int(value) == value and value >= least  # type: ignore[arg-type]


def checked_count(name: str, value: Any, *, least: int = 1, what: str = "") -> int:
    """The number as an int; an error that names it where it is none. `what` it counts is added to the message."""
    if not is_count(value, least=least):
        raise ValueError(f"{name}={value!r} must be a whole number{f' of {what}' if what else ''}, {least} or more.")
    return int(value)


def checked_seed(value: Any) -> int:
    """A seed as an int; raises ValueError unless it is a whole number that torch's generators take."""
    if not is_count(value, least=-(2**63)) or int(value) >= 2**64:
        raise ValueError(f"seed={value!r} must be a whole number from −2⁶³ to 2⁶⁴ − 1.")
    return int(value)


def is_number(value: object) -> bool:
    """Whether it is one real number: not a word, a list, True, or a tensor of several."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)
