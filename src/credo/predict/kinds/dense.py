"""Predictions of a class for each position of an input: pixels, tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import nan, prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from credo.core.likelihood import Categorical, ClassLikelihood
from credo.core.likelihood.classes import IGNORED
from credo.predict.moments import ClassMoments, Moments
from credo.predict.result import ClassPrediction


@dataclass(frozen=True, repr=False)
class DenseClassPrediction(ClassPrediction):
    """Class probabilities of every position, [n, *positions, classes], and what else a `ClassPrediction` has.

    Classes come last, wherever the network has them. `targets` hold the likelihood's `ignore_index` at positions that
    do not count, and there `log_likelihood` is NaN. `sets` [n, *positions, classes] are those of `posterior.conformal`.
    Where batches have different lengths, the shorter ones are followed by positions of probability 0 and label −1.
    """

    _filling: ClassVar[Mapping[str, float]] = {
        **{field.name: 0.0 for field in fields(ClassPrediction)},
        "targets": IGNORED,
        "log_likelihood": nan,
    }

    @property
    def labels(self) -> Tensor:
        """The most probable class of each position; −1 where there is none, and in rows that are not `finite`."""
        finite = self.finite.view(-1, *[1] * (self.probs.dim() - 2))
        return self.probs.argmax(-1).masked_fill(~(finite & self._exists), -1)

    @property
    def _exists(self) -> Tensor:
        """Which positions the network had, [n, *positions]; the others fill up shorter batches."""
        return self.probs.amax(-1) != 0

    def _columns(self, count: int) -> dict[str, list[str]]:
        classes = self.probs.shape[-1]
        share = [
            " ".join(f"{n:.0%}" for n in torch.bincount(row.flatten().clamp_min(0), minlength=classes) / row.numel())
            for row in self.labels[:count]
        ]
        numbers = {name: getattr(self, name)[:count] for name in ("confidence", "total", "epistemic")}
        means = {f"mean {name}": [f"{row.mean():.4f}" for row in values] for name, values in numbers.items()}
        return {f"positions of class 0 to {classes - 1}": share, **means}

    def by_position(self) -> ClassPrediction:
        """The positions that count as rows of a `ClassPrediction`, for metrics: neighbours are not independent."""
        keep = self._exists if self.log_likelihood is None else ~self.log_likelihood.isnan()
        draws = self.draws_used.view(-1, *[1] * (keep.dim() - 1)).expand(keep.shape)
        found: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(ClassPrediction)}
        found["draws_used"] = draws
        rows: dict[str, Any] = {name: None if value is None else value[keep] for name, value in found.items()}
        return ClassPrediction(**rows)


class DenseMoments(Moments):
    """The sums of `ClassMoments` with every position as a row.

    Args:
        likelihood: Says which dimension holds the classes, and which label does not count.
        outputs: Of the first draws, [draws, batch, …].
        targets: Labels of each position, if there are any.
        temperature: Of the log probabilities of each draw.
    """

    def __init__(
        self, likelihood: ClassLikelihood, outputs: Tensor, targets: Tensor | None, temperature: float = 1.0
    ) -> None:
        assert isinstance(likelihood, Categorical)
        self.likelihood, self.targets = likelihood, targets
        self.shape = outputs.movedim(likelihood.class_dim, -1).shape[1:-1]  # batch and positions
        self.size = prod(self.shape[1:])
        labels = None
        if targets is not None:
            if targets.shape != self.shape:
                raise ValueError(f"Labels must have shape {list(self.shape)}; got {list(targets.shape)}.")
            self.counted = targets != likelihood.ignore_index
            labels = torch.where(self.counted, targets, 0).flatten()
        self.rows = ClassMoments(Categorical(), self._flat(outputs), labels, temperature)

    @property
    def count(self) -> Tensor:  # type: ignore[override]
        """Draws of each row of the batch."""
        return self.rows.count.view(self.shape[0], -1)[:, 0]

    def add(self, outputs: Tensor, rows: Tensor | slice) -> None:
        """Add the class probabilities of further draws."""
        if isinstance(rows, Tensor):
            rows = (rows.unsqueeze(1) * self.size + torch.arange(self.size, device=rows.device)).flatten()
        self.rows.add(self._flat(outputs), rows)

    def error(self) -> Tensor:
        """Standard error of the least certain position and class."""
        return self.rows.error().view(self.shape[0], -1).amax(1)

    def result(self) -> DenseClassPrediction:
        """The prediction of each position."""
        found = self.rows.result()
        each: dict[str, Any] = {
            field.name: self._unflattened(getattr(found, field.name))
            for field in fields(ClassPrediction)
            if field.name != "draws_used"
        }
        prediction = DenseClassPrediction(draws_used=self.count.cpu(), **each)
        if self.targets is None or prediction.log_likelihood is None:
            return prediction
        known = prediction.log_likelihood.masked_fill(~self.counted.cpu(), torch.nan)
        return replace(prediction, targets=self.targets.cpu(), log_likelihood=known)

    def _flat(self, outputs: Tensor) -> Tensor:
        return outputs.movedim(self.likelihood.class_dim, -1).flatten(1, -2)

    def _unflattened(self, value: Tensor | None) -> Tensor | None:
        return None if value is None else value.unflatten(0, self.shape)
