"""The choice among maps by the cross-fitted NLL, where a simpler map is kept unless another is better beyond noise.

From no map at all to the one with the most numbers, each takes the place of the one before if

    mean(d) > 2·max(std(d), S)/√n,

where the gain dᵢ of row i is its NLL under the one before minus that under this one, both fitted without the row, and S
is the standard deviation of the gain if the predictions are right as they are. A few rows that are all predicted well
hold no example of what is rare, so that their own standard deviation is far too small; S knows how often it happens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.calibration.class_fits import CLASS_FITS, PRIOR
from credo.calibration.value_fits import VALUE_FITS
from credo.core.errors import CalibrationWarning, unknown
from credo.core.held_out.class_maps import ClassMap
from credo.core.held_out.recalibration import Map, Recalibration
from credo.core.held_out.value_map import ResidualMap
from credo.core.support.user_warnings import warn

# Rows that a map needs: for each number that is fitted, and at least.
_ROWS_EACH, _LEAST_ROWS = 10, 50
# Standard errors of the gain that a map must be better by.
_BEYOND = 2.0
# Of a map that "auto" tries: larger matrices (more than 50 classes) take minutes.
_MOST_NUMBERS = 2550


class Rows(ABC):
    """Held-out predictions, with what a map needs of them.

    Args:
        before: NLL of each row without a map, float64.
    """

    def __init__(self, before: Tensor) -> None:
        self.before = before

    @abstractmethod
    def numbers(self) -> dict[str, int]:
        """How many numbers each kind fits, in ascending order."""

    @abstractmethod
    def fit(self, kind: str, chosen: Tensor) -> Map:
        """Fit a map on the rows of a mask."""

    @abstractmethod
    def nll(self, made: Map, chosen: Tensor) -> Tensor:
        """NLL of each row of a mask under a map."""

    @abstractmethod
    def expected(self, made: Map | None, chosen: Tensor) -> Tensor:
        """Log-probability or log-density at each value that the targets of these rows may have, under a map or none.

        [rows, values, outputs]; outputs are independent, and `weights` has the probabilities of the values.
        """

    @property
    @abstractmethod
    def weights(self) -> Tensor:
        """Probability of each of these values if the predictions are right as they are, [rows or 1, values, 1]."""


class ClassRows(Rows):
    """Class probabilities of held-out rows.

    Args:
        log_probs: Finite log-probabilities [rows, classes], float64.
        labels: Class indices [rows].
        before: NLL of each row without a map.
    """

    def __init__(self, log_probs: Tensor, labels: Tensor, before: Tensor) -> None:
        super().__init__(before)
        self.log_probs, self.labels = log_probs, labels

    def numbers(self) -> dict[str, int]:
        """How many numbers each kind fits; an isotonic curve counts as three, like a beta curve."""
        classes = self.log_probs.shape[1]
        each = {"temperature": 1, "vector": 2 * classes, "beta": 3 * classes, "isotonic": 3 * classes}
        return {**each, "dirichlet": classes * (classes + 1)}

    def fit(self, kind: str, chosen: Tensor) -> Map:
        """Fit a map on the rows of a mask."""
        return CLASS_FITS[kind](self.log_probs[chosen], self.labels[chosen], PRIOR)  # type: ignore[return-value]

    def nll(self, made: Map, chosen: Tensor) -> Tensor:
        """NLL of each row of a mask under a map."""
        return -self._mapped(made, chosen).gather(1, self.labels[chosen][:, None])[:, 0]

    def expected(self, made: Map | None, chosen: Tensor) -> Tensor:
        """Log-probabilities of all classes."""
        found = self.log_probs[chosen] if made is None else self._mapped(made, chosen)
        return found.unsqueeze(2)

    @property
    def weights(self) -> Tensor:
        """The probabilities of the classes."""
        return self.log_probs.exp().unsqueeze(2)

    def _mapped(self, made: Map, chosen: Tensor) -> Tensor:
        assert isinstance(made, ClassMap)
        return made.log_probs(self.log_probs[chosen])


class ValueRows(Rows):
    """Residuals of held-out rows of a regression.

    Args:
        residuals: (target − mean)/total, [rows, outputs], float64.
        log_stds: Σ log total of each row.
        before: NLL of each row without a map.
    """

    def __init__(self, residuals: Tensor, log_stds: Tensor, before: Tensor) -> None:
        super().__init__(before)
        self.residuals, self.log_stds = residuals, log_stds
        levels = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
        self.normal: Tensor = torch.special.ndtri(levels)[:, None].expand(-1, residuals.shape[1])

    def numbers(self) -> dict[str, int]:
        """How many numbers each kind fits, for each output alike."""
        return {"std-scale": 1, "quantile": 10}

    def fit(self, kind: str, chosen: Tensor) -> Map:
        """Fit a map on the rows of a mask."""
        return VALUE_FITS[kind](self.residuals[chosen], PRIOR)

    def nll(self, made: Map, chosen: Tensor) -> Tensor:
        """NLL of each row of a mask under a map."""
        assert isinstance(made, ResidualMap)
        return self.log_stds[chosen] - made.log_density(self.residuals[chosen]).sum(1)

    def expected(self, made: Map | None, chosen: Tensor) -> Tensor:
        """Log-densities at 100 quantiles of normal residuals, the same for each row."""
        assert made is None or isinstance(made, ResidualMap)
        plain = -0.5 * self.normal.square() - 0.5 * math.log(2 * math.pi)
        found = plain if made is None else made.log_density(self.normal)
        return found.expand(int(chosen.sum()), -1, -1)

    @property
    def weights(self) -> Tensor:
        """Equal ones."""
        return torch.full((1, len(self.normal), 1), 1 / len(self.normal), dtype=torch.float64)


@dataclass(frozen=True)
class Tried:
    """A kind of map on rows that it was not fitted on.

    Attributes:
        kind: Its name.
        nll: Cross-fitted NLL of each row.
        expected: Cross-fitted log-probabilities of what the targets may be, as in `Rows.expected`.
    """

    kind: str
    nll: Tensor
    expected: Tensor

    def is_better(self, other: Tried, weights: Tensor) -> bool:
        """Whether it is better than a simpler one beyond noise.

        Args:
            other: On the same rows.
            weights: Probabilities if the predictions are right as they are, as in `Rows.weights`.
        """
        gains, rows = other.nll - self.nll, len(self.nll)
        expected = self.expected - other.expected
        from_mean = expected - (weights * expected).sum(1, keepdim=True)
        variance = (weights * from_mean.square()).sum((1, 2)).mean()
        std = torch.maximum(gains.std(), variance.sqrt())
        return bool(gains.mean() > _BEYOND * std / math.sqrt(rows))


def choose(rows: Rows, kind: str, fold: Tensor) -> Recalibration:
    """Fit the map of this kind, or of the best kind, unless none is better than no map beyond noise.

    Args:
        rows: Held-out predictions.
        kind: One of the rows' kinds, or `"auto"` for all with enough rows.
        fold: The fold of each row, from 0.
    """
    numbers, count = rows.numbers(), len(rows.before)
    if kind not in ("auto", *numbers):
        raise ValueError(unknown("kind of recalibration", str(kind), ("auto", *numbers)))
    everything = torch.ones(count, dtype=torch.bool)
    weights, best = rows.weights, Tried("none", rows.before, rows.expected(None, everything))
    scores = {"none": float(best.nll.mean())}
    for name in _with_enough_rows(rows, kind):
        tried = _cross_fitted(rows, name, fold)
        scores[name] = float(tried.nll.mean())
        best = tried if tried.is_better(best, weights) else best
    made = None if best.kind == "none" else rows.fit(best.kind, everything)
    return Recalibration(best.kind, made, count, scores["none"], scores[best.kind], scores)


def _with_enough_rows(rows: Rows, kind: str) -> list[str]:
    """The kinds to try; a `CalibrationWarning` tells if there are too few rows for one that was asked for."""
    count = len(rows.before)
    if kind == "auto":
        most = {name: max(_LEAST_ROWS, _ROWS_EACH * numbers) for name, numbers in rows.numbers().items()}
        return [name for name, needed in most.items() if needed <= min(count, _ROWS_EACH * _MOST_NUMBERS)]
    needed = max(_LEAST_ROWS, _ROWS_EACH * rows.numbers()[kind])
    if count >= needed:
        return [kind]
    warn(
        f"No recalibration: kind={kind!r} needs {needed} held-out rows, ten for each number that it fits and at least "
        f"{_LEAST_ROWS}; there are {count}.",
        CalibrationWarning,
    )
    return []


def folds_of(keys: Tensor | Sequence[int], folds: int) -> Tensor:
    """The fold of each row: rows with equal keys are in the same one.

    Args:
        keys: A number for each row.
        folds: How many folds there are at most.
    """
    _, index = torch.as_tensor(keys).unique(return_inverse=True)
    found: Tensor = index % folds
    return found


def _cross_fitted(rows: Rows, kind: str, fold: Tensor) -> Tried:
    nll = torch.zeros_like(rows.before)
    expected = rows.expected(None, torch.ones_like(fold, dtype=torch.bool)).clone()
    for index in fold.unique().tolist():
        outside = fold == index
        made = rows.fit(kind, ~outside)
        nll[outside], expected[outside] = rows.nll(made, outside), rows.expected(made, outside)
    return Tried(kind, nll, expected)
