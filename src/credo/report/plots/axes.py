"""Axes with round ticks, and formatting of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MINUS = "\N{MINUS SIGN}"
THIN = "\N{NARROW NO-BREAK SPACE}"


@dataclass(frozen=True)
class Axis:
    """A range of values with ticks and a label; `form` formats a tick."""

    low: float
    high: float
    ticks: tuple[float, ...]
    label: str
    form: Callable[[float], str]
    log: bool = False

    def position(self, value: float) -> float:
        """Relative position of a value: 0 at the low end, 1 at the high end, beyond them outside the range."""
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        if value <= 0:
            return -1.0
        return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))


def axis(values: Iterable[float], label: str, *, form: Callable[[float], str] | None = None) -> Axis:
    """An axis over all finite values that starts and ends at round numbers.

    Args:
        values: Values to cover.
        label: Label of the axis.
        form: Formats a tick; `plain` by default.
    """
    low, high = _ends(values)
    step = _step(low, high)
    low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    return Axis(low, high, _multiples(low, high, step), label, form or plain)


def positive_axis(values: Iterable[float], label: str) -> Axis:
    """Logarithmic axis if the values are positive and span more than a factor of thirty, else `axis`."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) <= 0 or max(finite) < 30 * min(finite):
        return axis(finite, label)
    low, high = math.floor(math.log10(min(finite))), math.ceil(math.log10(max(finite)))
    round_ones = [digit * 10.0**power for power in range(low, high + 1) for digit in (1, 2, 5)]
    start = max(one for one in round_ones if one <= min(finite) * (1 + 1e-9))
    end = min(one for one in round_ones if one >= max(finite) * (1 - 1e-9))
    ticks = [one for one in round_ones if start <= one <= end]
    if len(ticks) > 9:
        every = -(-(high - low) // 5)
        ticks = [one for one in (10.0**power for power in range(low, high + 1, every)) if start <= one <= end]
    return Axis(start, end, tuple(ticks), f"{label}, log scale", plain, log=True)


def fraction_axis(label: str, low: float = 0.0, high: float = 1.0) -> Axis:
    """An axis of fractions from `low` to `high` with `label`, formatted in per cent."""
    return Axis(low, high, _multiples(low, high, _step(low, high)), label, percent_tick)


def _ends(values: Iterable[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    room = 0.5 * abs(low) or 0.5
    return low - room, high + room


def _step(low: float, high: float, most: int = 4) -> float:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(round_one for round_one in (1, 2, 2.5, 5, 10) if power * round_one >= rough * (1 - 1e-9))


def _multiples(low: float, high: float, step: float) -> tuple[float, ...]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(count * step for count in range(first, last + 1))


def plain(value: float) -> str:
    """At most four digits without trailing zeros, for ticks."""
    if value and not 1e-4 <= abs(value) < 1e5:
        return minus(f"{value:.2g}")
    return minus(f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}")


def percent_tick(value: float) -> str:
    """A fraction in per cent without trailing zeros."""
    return f"{100 * value:.4g}{THIN}%"


def number(value: float | None) -> str:
    """Three decimals, or three significant digits of small and large numbers."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return minus(f"{value:,.0f}")
    if abs(value) >= 10:
        return minus(f"{value:.2f}")
    return minus(f"{value:.3f}" if abs(value) >= 0.01 or value == 0 else f"{value:.2g}")


def percent(value: float | None) -> str:
    """A fraction in per cent with one decimal."""
    return "–" if value is None or not math.isfinite(value) else minus(f"{100 * value:.1f}{THIN}%")


def count(value: float | None) -> str:
    """An integer with thousands separators."""
    return "–" if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Seconds up to a minute, then minutes, then hours."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f}{THIN}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{THIN}min {rest}{THIN}s"
    return f"{minutes // 60}{THIN}h {minutes % 60}{THIN}min"


def minus(text: str) -> str:
    """Replace hyphens by minus signs."""
    return text.replace("-", MINUS)
