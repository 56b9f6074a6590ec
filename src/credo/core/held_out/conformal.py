"""What conformal prediction chose on held-out rows: thresholds on scores, which make sets of classes and intervals.

A set contains the label of a new row, an interval its target, with probability 1 − alpha or more: over the choice of
the calibration rows and of the new row, if these are exchangeable. Under shift it does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.core.errors import unknown
from credo.core.held_out.conformal_inputs import as_tensor, both_classes, outputs_of, value_parts
from credo.core.held_out.conformal_scores import aps_scores, lac_scores, positive, rank_of, row_uniforms, rows_needed
from credo.core.held_out.risk_sets import RISK_KINDS, RiskControlledSets
from credo.core.held_out.thresholds import SHIFT, Thresholds
from credo.core.support.binomial import beta_quantile
from credo.core.support.validate import is_count, is_number

SET_KINDS = ("lac", "aps", "raps")
INTERVAL_KINDS = ("split", "normalised", "cqr")


@dataclass(frozen=True)
class Coverage:
    """What these calibration rows may cover: its distribution over their choice, Beta(n + 1 − l, l), l = ⌊(n + 1)α⌋.

    Attributes:
        mean: Expected coverage, 1 − alpha or slightly more.
        low: With 2.5 % of all calibration sets it is lower.
        high: With 2.5 % it is higher. Ties of scores and sets that are forced to be non-empty cover more than this.
    """

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class _Conformal(Thresholds):
    """What sets and intervals that cover a target have in common."""

    @property
    def coverage(self) -> Coverage:
        """Distribution of the coverage; by class, that of the class with the fewest rows whose threshold is finite."""
        return coverage_of(self._fewest(), self.alpha)

    def _fewest(self) -> int:
        finite = [rows for rows, value in zip(self.rows, self.thresholds, strict=True) if not math.isinf(value)]
        return min(finite or self.rows)

    def _about(self) -> str:
        found, infinite = self.coverage, sum(math.isinf(value) for value in self.thresholds)
        rows = f"{self.rows[0]} rows" if len(self.rows) == 1 else f"{self._fewest()} rows or more of each class"
        text = f"{100 * (1 - self.alpha):.6g} % coverage from {rows}; of 95 % of such sets of rows it is between "
        text += f"{100 * found.low:.1f} and {100 * found.high:.1f} %. {SHIFT}"
        short = f" {infinite} of {len(self.thresholds)} thresholds are infinite: {rows_needed(self.alpha)} rows needed."
        return text + (short if infinite else "")


@dataclass(frozen=True, repr=False)
class ConformalSets(_Conformal):
    """Sets of classes: those with a score up to the threshold. Made by `credo.conformal`.

    Attributes:
        kind: `"lac"`, `"aps"` or `"raps"`.
        alpha: Probability that a set misses the label.
        thresholds: One, or one for each class; infinite where there were too few rows.
        rows: Number of calibration rows behind each.
        classes: Number of classes.
        randomised: Whether the score of APS and RAPS counts a random part of a class's own probability.
        allow_empty: Whether a set may be empty; otherwise it has at least the most probable class.
        penalty: λ of RAPS.
        k_reg: Number of classes of each row that RAPS does not penalise.
        chosen_on: Number of other rows that chose the penalty of RAPS; 0 if it was given.
    """

    classes: int
    randomised: bool = True
    allow_empty: bool = False
    penalty: float = 0.0
    k_reg: int = 0
    chosen_on: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that cannot be applied."""
        super().__post_init__()
        if self.kind not in SET_KINDS:
            raise ValueError(unknown("kind", str(self.kind), SET_KINDS))
        if not is_count(self.classes, least=2) or len(self.thresholds) not in (1, self.classes):
            raise ValueError(f"{len(self.thresholds)} thresholds do not fit classes={self.classes!r:.40}")
        for name in ("penalty", "k_reg"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"{name}={value!r:.40} must be a number, 0 or more.")
        if not is_count(self.chosen_on, least=0):
            raise ValueError(f"chosen_on={self.chosen_on!r:.40} must be a count of rows.")

    def scores(self, probs: Tensor, uniforms: Tensor | None = None) -> Tensor:
        """The score of every class, float64 [n, classes].

        Args:
            probs: Class probabilities [n, classes].
            uniforms: Random numbers in [0, 1] of the rows [n]; None: functions of the row's probabilities.
        """
        if self.kind == "lac":
            return lac_scores(probs)
        if not self.randomised:
            uniforms = None
        elif uniforms is None:
            uniforms = row_uniforms(probs)
        penalty, k_reg = (self.penalty, self.k_reg) if self.kind == "raps" else (0.0, 0)
        return aps_scores(probs, uniforms, penalty=penalty, k_reg=k_reg)

    def sets(self, prediction: Any, uniforms: Tensor | None = None) -> Tensor:
        """Which classes are in the set of each row, bool [n, classes]; all of them for a row that is not finite.

        Args:
            prediction: A `ClassPrediction` or probabilities [n, classes]; [n] of a yes for yes/no.
            uniforms: Random numbers in [0, 1] of the rows [n]; None: functions of the row's probabilities.
        """
        probs = both_classes(as_tensor(getattr(prediction, "probs", prediction)))
        if probs.dim() != 2 or probs.shape[1] != self.classes:
            raise ValueError(f"probs have shape {list(probs.shape)}; these sets are for [n, {self.classes}].")
        chosen = self.scores(probs, uniforms) <= torch.tensor(self.thresholds, dtype=torch.float64, device=probs.device)
        if not self.allow_empty:
            chosen |= ~chosen.any(-1, keepdim=True) & (probs == probs.amax(-1, keepdim=True))
        return chosen | probs.isnan().any(-1, keepdim=True)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ConformalSets:
        """What `to_dict` returned.

        Args:
            given: The values.
        """
        return cls._from(given)

    def __repr__(self) -> str:
        kind = self.kind.upper() + (" by class" if len(self.thresholds) > 1 else "")
        if self.kind == "raps":
            beyond = f" with penalty {self.penalty:g} beyond {self.k_reg} classes"
            kind += beyond if self.penalty else " without a penalty, which is APS"
            kind += f" (chosen on {self.chosen_on} other rows)" if self.chosen_on else ""
        return f"ConformalSets({kind}, {self._about()})"


@dataclass(frozen=True, repr=False)
class ConformalIntervals(_Conformal):
    """Intervals around predictions; of several outputs, all contain their targets together. Made by `credo.conformal`.

    Attributes:
        kind: `"split"`: mean ± t; `"normalised"`: mean ± t·std; `"cqr"`: from lower − t to upper + t.
        alpha: Probability that the interval of any output misses its target.
        thresholds: t, infinite if there were too few rows.
        rows: Number of calibration rows.
        outputs: Number of targets of each row.
    """

    outputs: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that cannot be applied."""
        super().__post_init__()
        if self.kind not in INTERVAL_KINDS:
            raise ValueError(unknown("kind", str(self.kind), INTERVAL_KINDS))
        if not is_count(self.outputs) or len(self.thresholds) != 1:
            raise ValueError(f"{len(self.thresholds)} thresholds do not fit outputs={self.outputs!r:.40}")

    def intervals(self, prediction: Any) -> tuple[Tensor, Tensor]:
        """Lower and upper ends, each in the shape of the means.

        Args:
            prediction: A `RegressionPrediction`, or arrays: means for `"split"`, (means, standard deviations) for
                `"normalised"`, (lower, upper) quantiles for `"cqr"`.
        """
        first, second = value_parts(prediction, self.kind)
        if outputs_of(first) != self.outputs:
            raise ValueError(f"predictions of shape {list(first.shape)} have not {self.outputs} outputs.")
        width = self.thresholds[0]
        if self.kind == "cqr":
            assert second is not None
            lower, upper = first - width, second + width
            middle = 0.5 * (lower + upper)
            crossed = lower > upper  # by a negative width: nothing fits, and one point is left
            return torch.where(crossed, middle, lower), torch.where(crossed, middle, upper)
        half = torch.full_like(first, width) if second is None else width * positive(second)
        return first - half, first + half

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ConformalIntervals:
        """What `to_dict` returned.

        Args:
            given: The values.
        """
        return cls._from(given)

    def __repr__(self) -> str:
        joint = "" if self.outputs == 1 else f", {self.outputs} outputs together"
        return f"ConformalIntervals({self.kind}{joint}, {self._about()})"


Conformal = ConformalSets | ConformalIntervals | RiskControlledSets


def conformal_from(given: Any) -> Conformal | None:
    """The sets or intervals in a file, None if there are none; raises ValueError if they are damaged.

    Args:
        given: What `to_dict` returned, or None.
    """
    if given is None:
        return None
    needed = ("kind", "alpha", "thresholds", "rows")
    if not isinstance(given, Mapping) or any(name not in given for name in needed):
        raise ValueError(f"a conformal prediction cannot be {given!r:.60}")
    try:
        if given["kind"] in RISK_KINDS:
            return RiskControlledSets.from_dict(given)
        return (ConformalSets if given["kind"] in SET_KINDS else ConformalIntervals).from_dict(given)
    except TypeError as error:
        raise ValueError(f"a conformal prediction cannot be {given!r:.60}: {error}") from error


def coverage_of(rows: int, alpha: float) -> Coverage:
    """The distribution of coverage over calibration sets of this size.

    Args:
        rows: Number of calibration rows.
        alpha: Probability of a miss.
    """
    rank = rank_of(alpha, rows)
    if rank > rows:
        return Coverage(1.0, 1.0, 1.0)
    missed = rows + 1 - rank
    low, high = (beta_quantile(level, rank, missed) for level in (0.025, 0.975))
    return Coverage(rank / (rows + 1), low, high)
