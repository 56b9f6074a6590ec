"""Predictions: plain tensors on the CPU, one row per input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from credo.core.errors import unknown
from credo.core.held_out.value_map import ResidualMap
from credo.predict.kinds.target_distribution import NormalMixture, Recalibrated, TargetDistribution

P = TypeVar("P", bound="Prediction")
DECOMPOSITIONS = ("entropy", "covariance", "entropy-deviation")


@dataclass(frozen=True)
class Uncertainty:
    """Total, aleatoric and epistemic uncertainty of each input, [n] each."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


# Rows that `print` shows, and entries of each: classes of a set, values of a target.
_ROWS_SHOWN, _ENTRIES_SHOWN = 5, 3


@dataclass(frozen=True, repr=False)
class Prediction:
    """Fields common to classification and regression.

    `draws_used` [n] counts weight draws per input; `targets` are those of the loader, if any; `log_likelihood` [n] is
    log p̄(target) under the whole mixture of draws, None without targets. Rows that are not `finite`, which
    `predict(..., on_nonfinite="mark")` leaves in, hold NaN.
    """

    _checked: ClassVar[tuple[str, ...]] = ()
    """The fields that are NaN or infinite if the outputs of any draw were."""
    _filling: ClassVar[Mapping[str, float]] = {}
    """What fields hold where batches of other shapes have no entry; NaN if it is not said."""

    draws_used: Tensor
    targets: Tensor | None
    log_likelihood: Tensor | None

    def __len__(self) -> int:
        return len(self.draws_used)

    @property
    def finite(self) -> Tensor:
        """Which rows have a prediction, [n]: the outputs of every draw for them are finite."""
        found: list[Tensor] = [getattr(self, name).isfinite().reshape(len(self), -1).all(-1) for name in self._checked]
        return reduce(torch.logical_and, found, torch.ones(len(self), dtype=torch.bool))

    def __repr__(self) -> str:
        """Names and shapes, not the numbers."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        shapes = [f"{name} {list(value.shape)}" for name, value in tensors.items() if isinstance(value, Tensor)]
        return f"{type(self).__name__}({', '.join(shapes)})"

    def __str__(self) -> str:
        """The first rows as a table."""
        shown = min(len(self), _ROWS_SHOWN)
        columns = {"row": list(map(str, range(shown))), **self._columns(shown)}
        lines = [[name, *cells] for name, cells in columns.items()]
        widths = [max(map(len, line)) for line in lines]
        rows = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in zip(*lines, strict=True)
        ]
        draws = sorted({int(self.draws_used.min()), int(self.draws_used.max())}) if len(self) else [0]
        used = " to ".join(map(str, draws))
        names = ", ".join(f.name for f in fields(self) if getattr(self, f.name) is not None)
        rows.append(f"{shown} of {len(self)} rows, {used} draw{'' if used == '1' else 's'}; fields: {names}")
        return "\n".join(rows)

    def _columns(self, count: int) -> dict[str, list[str]]:
        """Cells of the first `count` rows by the name of their column."""
        return {}


@dataclass(frozen=True, repr=False)
class ClassPrediction(Prediction):
    """Class probabilities averaged over draws, and three decompositions of their uncertainty.

    `total`, `aleatoric` and `epistemic` are the entropy decomposition (nats); `uncertainty(name)` gives the others.
    `mc_error` [n] estimates the standard error of the least certain class probability. `sets` [n, classes] are those of
    `posterior.conformal`, None without it.
    """

    _checked = ("probs",)

    probs: Tensor
    mean_entropy: Tensor
    mutual_information: Tensor
    entropy_deviation: Tensor
    aleatoric_by_class: Tensor
    epistemic_by_class: Tensor
    mc_error: Tensor
    sets: Tensor | None = None

    def _columns(self, count: int) -> dict[str, list[str]]:
        numbers = {name: getattr(self, name)[:count] for name in ("confidence", "total", "aleatoric", "epistemic")}
        cells = {"label": [str(label) for label in self.labels[:count].tolist()]}
        cells |= {name: [f"{value:.4f}" for value in values.tolist()] for name, values in numbers.items()}
        if self.sets is not None:
            cells["set"] = set_cells(self.sets[:count])
        if self.targets is not None:
            cells["target"] = [str(target) for target in self.targets[:count].tolist()]
        return cells

    @property
    def labels(self) -> Tensor:
        """The most probable class; −1 for rows that are not `finite`."""
        return self.probs.argmax(-1).masked_fill(~self.finite, -1)

    @property
    def confidence(self) -> Tensor:
        """Probability of the most probable class."""
        return self.probs.amax(-1)

    @property
    def total(self) -> Tensor:
        """Entropy of the averaged probabilities."""
        return self.uncertainty("entropy").total

    @property
    def aleatoric(self) -> Tensor:
        """Average entropy of the draws."""
        return self.uncertainty("entropy").aleatoric

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of label and weights."""
        return self.uncertainty("entropy").epistemic

    def uncertainty(self, decomposition: str = "entropy") -> Uncertainty:
        """Decompose the uncertainty of each input; p_s are the probabilities of draw s, p̄ their mean.

        Args:
            decomposition: `"entropy"`: total H[p̄], aleatoric mean H[p_s], epistemic their difference, the mutual
                information of label and weights. `"covariance"` (Kwon et al. 2018, traces): Σ p̄(1−p̄) =
                Σ mean p_s(1−p_s) + Σ var p_s. `"entropy-deviation"` (Zhang et al. 2022): aleatoric Ha = mean H[p_s],
                epistemic mean |H[p_s] − Ha|, total their sum, which is not H[p̄].
        """
        if decomposition == "entropy":
            total = torch.special.entr(self.probs).sum(-1)
            # Not the difference of the two, which float32 would round away for confident inputs.
            return Uncertainty(total, self.mean_entropy, self.mutual_information)
        if decomposition == "covariance":
            aleatoric, epistemic = self.aleatoric_by_class.sum(-1), self.epistemic_by_class.sum(-1)
            return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)
        if decomposition == "entropy-deviation":
            total = self.mean_entropy + self.entropy_deviation
            return Uncertainty(total, self.mean_entropy, self.entropy_deviation)
        raise ValueError(unknown("decomposition", decomposition, DECOMPOSITIONS))


@dataclass(frozen=True, repr=False)
class RegressionPrediction(Prediction):
    """Predictive mean and standard deviations, each [n, outputs]; total² = aleatoric² + epistemic².

    `epistemic` is the population standard deviation of the draws' means, their mean square deviation with 1/S.
    The distribution of a new target, which `cdf`, `quantile`, `interval`, `pit` and `crps` are of, is the mixture of
    the draws' normals: `offsets` [n, draws, outputs] are their means less `mean`, NaN beyond `draws_used`, and `stds`
    their standard deviations, None where all of a row are its `aleatoric`. Without `offsets` it is normal itself, as
    that of one draw or of a closed form is. `residuals` take its place if `credo.recalibrate` has found how they are
    distributed.
    `lower` and `upper` are the ends of the intervals of `posterior.conformal`, None without it.
    """

    _checked = ("mean", "aleatoric", "epistemic")

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    residuals: ResidualMap | None = None
    lower: Tensor | None = None
    upper: Tensor | None = None
    offsets: Tensor | None = None
    stds: Tensor | None = None

    def _columns(self, count: int) -> dict[str, list[str]]:
        cells = {
            name: number_cells(getattr(self, name)[:count]) for name in ("mean", "total", "aleatoric", "epistemic")
        }
        if self.lower is not None and self.upper is not None:
            ends = zip(number_cells(self.lower[:count]), number_cells(self.upper[:count]), strict=True)
            cells["interval"] = [f"{low} to {high}" for low, high in ends]
        if self.targets is not None:
            cells["target"] = number_cells(self.targets[:count])
        return cells

    @property
    def total(self) -> Tensor:
        """Standard deviation of a new target."""
        return torch.hypot(self.aleatoric, self.epistemic)  # whose squares may be 0 or infinite in float32

    @property
    def std(self) -> Tensor:
        """The same as `total`, by the name that it has elsewhere."""
        return self.total

    @property
    def is_discrete(self) -> bool:
        """Whether targets are counts."""
        return False

    def quantile(self, level: float) -> Tensor:
        """The smallest value [n, outputs] that a new target is at most with probability `level`.

        Args:
            level: Between 0 and 1.
        """
        return self.distribution().quantile(checked_level(level)).to(self.mean.dtype)

    def pit(self, seed: int = 0) -> Tensor:
        """The probability integral transform of the targets: their `cdf`, uniform if they follow the prediction.

        Args:
            seed: Of the random numbers that counts need; not used here.
        """
        return self.cdf(self._values())

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper ends [n, outputs] of the central interval that holds a new target with probability `level`.

        Args:
            level: Between 0 and 1.
        """
        level = checked_level(level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def cdf(self, y: Tensor) -> Tensor:
        """The probability [n, outputs] of a target of at most `y`: uniform for targets that follow the prediction.

        Args:
            y: One value for each entry of the mean.
        """
        if y.shape != self.mean.shape:
            raise ValueError(f"y has shape {list(y.shape)}, the mean {list(self.mean.shape)}: they must be equal.")
        return self.distribution().cdf(y)

    def crps(self) -> Tensor:
        """Continuous ranked probability score ∫ (F − 1{· ≥ y})² of each row, the mean over its outputs.

        In closed form of normals and recalibrated residuals, else by quadrature; of counts by the sum.
        """
        found = self.distribution().crps(self._values())
        return found.reshape(len(found), -1).mean(1)

    def distribution(self) -> TargetDistribution:
        """The distribution of a new target, an object with `cdf(y)`, `quantile(level)` and `crps(y)` of each entry."""
        if self.residuals is not None:
            return Recalibrated(self.mean, self.total, self.residuals)
        if self.offsets is None:
            return NormalMixture(self.mean, torch.zeros_like(self.mean).unsqueeze(1), self.total.unsqueeze(1))
        check_kept(self.offsets)
        return NormalMixture(self.mean, self.offsets, self.aleatoric.unsqueeze(1) if self.stds is None else self.stds)

    def _values(self) -> Tensor:
        """The targets, of which there must be some."""
        if self.targets is None:
            raise ValueError("There are no targets: predict from batches of (inputs, targets).")
        return self.targets


def checked_level(level: float) -> float:
    """The same level; raises ValueError unless it lies between 0 and 1."""
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie between 0 and 1, such as 0.9.")
    return level


def check_kept(draws: Tensor) -> None:
    """Raise ValueError if what the draws [n, draws, …] say of each row was dropped."""
    if not draws.shape[1]:
        raise ValueError(
            "The draws were not kept, so there is no distribution of the targets, nor quantiles, intervals and CRPS: "
            "predict with keep_draws=True."
        )


def set_cells(sets: Tensor) -> list[str]:
    """The labels in the set of each row [n, labels], the first of many."""
    cells = []
    for row in sets:
        labels = row.nonzero().flatten().tolist()
        more = f", … ({len(labels)})" if len(labels) > _ENTRIES_SHOWN else ""
        cells.append("{" + ", ".join(map(str, labels[:_ENTRIES_SHOWN])) + more + "}")
    return cells


def number_cells(values: Tensor) -> list[str]:
    """The numbers of each row, the first of many."""
    rows = values.reshape(len(values), -1)
    more = " …" if rows.shape[1] > _ENTRIES_SHOWN else ""
    return [" ".join(f"{value:.4g}" for value in row[:_ENTRIES_SHOWN]) + more for row in rows.tolist()]


def rescaled(prediction: RegressionPrediction, mean: Tensor, std: Tensor) -> RegressionPrediction:
    """Convert a prediction to the units of the targets before they were standardised, (target − mean)/std.

    Args:
        prediction: In the units of training.
        mean: Mean of the targets; float64 if they lie far from zero, and then the result is float64, too.
        std: Standard deviation of the targets.
    """
    targets, density, lower, upper, offsets, stds = (
        getattr(prediction, name) for name in ("targets", "log_likelihood", "lower", "upper", "offsets", "stds")
    )
    return replace(
        prediction,
        targets=None if targets is None else targets * std + mean,
        log_likelihood=None if density is None else density - std.log().sum(),
        mean=prediction.mean * std + mean,
        aleatoric=prediction.aleatoric * std,
        epistemic=prediction.epistemic * std,
        lower=None if lower is None else lower * std + mean,
        upper=None if upper is None else upper * std + mean,
        offsets=None if offsets is None else (offsets * std).to(offsets.dtype),
        stds=None if stds is None else (stds * std).to(stds.dtype),
    )


def concatenate(parts: list[P]) -> P:
    """Join the predictions of consecutive batches."""
    if not parts:
        raise ValueError("Nothing to predict: there was no input.")
    if len(parts) == 1:
        return parts[0]
    merged: dict[str, Any] = {}
    for field in fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        is_each = all(isinstance(value, Tensor) for value in values)  # else None, or what all rows share
        filling = parts[0]._filling.get(field.name, torch.nan)
        merged[field.name] = (
            _stacked(values, filling) if is_each else None if any(v is None for v in values) else values[0]
        )
    return type(parts[0])(**merged)


def _stacked(values: list[Tensor], filling: float) -> Tensor:
    """Rows below each other; where batches have other numbers of draws or positions, filled up after the last."""
    shapes = {value.shape[1:] for value in values}
    if len(shapes) == 1 or len({len(shape) for shape in shapes}) > 1:
        return torch.cat(values)
    most = [max(sizes) for sizes in zip(*shapes, strict=True)]
    missing = [[m - n for m, n in zip(most, value.shape[1:], strict=True)] for value in values]
    sides = [[side for count in reversed(counts) for side in (0, count)] for counts in missing]
    return torch.cat([F.pad(value, pad, value=filling) for value, pad in zip(values, sides, strict=True)])
