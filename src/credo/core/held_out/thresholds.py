"""What every choice of thresholds on held-out rows has: numbers, the way of its predictions, its form in files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from credo.core.held_out.conformal_inputs import check_alpha
from credo.core.support.validate import is_count, is_number

SHIFT = "It holds for new rows like the calibration rows, not under shift."


@dataclass(frozen=True)
class Thresholds:
    """Fields common to sets and intervals.

    `draws`, `predictive`, `link` and `tolerance` are those of the predictions that chose the thresholds, as in
    `credo.predict`; `draws` is None where they are not known.
    """

    kind: str
    alpha: float
    thresholds: tuple[float, ...]
    rows: tuple[int, ...]
    draws: int | None = field(default=None, kw_only=True)
    predictive: str | None = field(default=None, kw_only=True)
    link: str | None = field(default=None, kw_only=True)
    tolerance: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that cannot be applied."""
        check_alpha(self.alpha)
        if not self.thresholds or len(self.thresholds) != len(self.rows):
            raise ValueError("a conformal threshold needs its number of rows, and the other way round")
        if any(not is_number(value) or math.isnan(value) for value in self.thresholds):
            raise ValueError(f"thresholds {self.thresholds!r:.60} must be numbers")
        if self.draws is not None and not is_count(self.draws):
            raise ValueError(f"draws={self.draws!r:.40} must be a count")
        if self.tolerance is not None and not is_number(self.tolerance):
            raise ValueError(f"tolerance={self.tolerance!r:.40} must be a number")

    def differences(self, draws: int | None, predictive: str, link: str | None, tolerance: float | None) -> str:
        """In which ways predictions are others than those that chose the thresholds; empty if in none that matters.

        Args:
            draws: Weight draws; None where their number does not matter.
            predictive: `"weights"` or `"linear"`.
            link: As in `credo.predict`.
            tolerance: As in `credo.predict`.
        """
        if self.draws is None:
            return ""
        is_coarser = draws is not None and tolerance is not None and tolerance > (self.tolerance or 0.0)
        found = {
            f"draws={draws} instead of {self.draws}": draws is not None and draws < self.draws,
            f"predictive={predictive!r} instead of {self.predictive!r}": predictive != self.predictive,
            f"link={link!r} instead of {self.link!r}": link != self.link,
            f"tolerance={tolerance} instead of {self.tolerance}": is_coarser,
        }
        return ", ".join(text for text, differs in found.items() if differs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for files; an infinite threshold is None."""
        plain = asdict(self)
        return plain | {"thresholds": [None if math.isinf(t) else t for t in self.thresholds], "rows": list(self.rows)}

    @classmethod
    def _from(cls, given: Mapping[str, Any]) -> Self:
        known = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        known["thresholds"] = tuple(math.inf if value is None else value for value in known["thresholds"])
        known["rows"] = tuple(known["rows"])
        if not all(is_count(count, least=0) for count in known["rows"]):
            raise ValueError(f"rows {known['rows']!r:.60} must be counts")
        return cls(**known)
