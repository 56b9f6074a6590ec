"""What held-out rows chose: the scale of a posterior's noise, the temperature of its outputs, and a map after them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from credo.core.held_out.recalibration import Recalibration
from credo.core.support.validate import is_count, is_number


@dataclass(frozen=True, eq=False)
class Calibration:
    """What `credo.calibrate` chose, which predictions apply: draws μ + s·(w − μ), then log-probabilities / T.

    After averaging over draws, predictions apply the map that `credo.recalibrate` chose for these numbers, if any.

    Attributes:
        noise_scale: s, the factor on the posterior's own noise; 0 is the network at the mean.
        temperature: T of the outputs of classification; 1 for regression.
        std_factor: Factor on the standard deviation of the targets' noise in regression; 1 for classification.
        rows: Number of held-out rows.
        draws: Draws that were averaged for the choice.
        nll_before: Mean NLL of these rows without calibration.
        nll_after: Their mean NLL with calibration, cross-fitted: each row under the numbers chosen without it.
        recalibration: What `credo.recalibrate` chose.
    """

    noise_scale: float = 1.0
    temperature: float = 1.0
    std_factor: float = 1.0
    rows: int = 0
    draws: int = 0
    nll_before: float = math.nan
    nll_after: float = math.nan
    recalibration: Recalibration | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that cannot be applied."""
        for name in ("temperature", "std_factor"):
            if not (_is_finite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name}={getattr(self, name)!r:.40} must be a positive number.")
        if not (_is_finite(self.noise_scale) and self.noise_scale >= 0):
            raise ValueError(f"noise_scale={self.noise_scale!r:.40} must be a number, 0 or more.")

    def __eq__(self, other: object) -> bool:
        """Whether all numbers are equal; those that are not known (NaN) are, unlike in dataclasses of Python 3.13."""
        if not isinstance(other, Calibration):
            return NotImplemented
        pairs = [(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return all(mine == theirs or (mine != mine and theirs != theirs) for mine, theirs in pairs)

    def __hash__(self) -> int:
        return hash((self.noise_scale, self.temperature, self.std_factor, self.rows))

    @property
    def changes(self) -> bool:
        """Whether the numbers change predictions; the map, which `recalibration.map` is None without, is left out."""
        return (self.noise_scale, self.temperature, self.std_factor) != (1.0, 1.0, 1.0)

    def to_dict(self) -> dict[str, Any]:
        """JSON, for files."""
        numbers = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "recalibration"}
        return numbers if self.recalibration is None else {**numbers, "recalibration": self.recalibration.to_dict()}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Calibration:
        """The calibration in a file; raises ValueError if it is damaged, and ignores what later versions may add.

        Args:
            given: What `to_dict` returned.
        """
        if not isinstance(given, Mapping):
            raise ValueError(f"a calibration cannot be {given!r:.40}")
        known = {field.name: given[field.name] for field in fields(cls) if given.get(field.name) is not None}
        recalibration = known.pop("recalibration", None)
        for name, value in known.items():
            if not (is_count(value, least=0) if name in ("rows", "draws") else is_number(value)):
                raise ValueError(f"{name}={value!r:.40} of the calibration is not a number")
        made = None if recalibration is None else Recalibration.from_dict(recalibration)
        return cls(**known, recalibration=made)


def _is_finite(value: object) -> bool:
    return is_number(value) and math.isfinite(value)  # type: ignore[arg-type]
