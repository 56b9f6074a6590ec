"""Sets of labels, or of classes at each position, that miss at most a stated part of the true ones in a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.core.errors import unknown
from credo.core.held_out.conformal_inputs import as_tensor
from credo.core.held_out.thresholds import SHIFT, Thresholds
from credo.core.support.validate import is_count, is_number

RISK_KINDS = ("fnr",)


@dataclass(frozen=True, repr=False)
class RiskControlledSets(Thresholds):
    """Sets of all labels whose probability reaches a threshold. Made by `credo.conformal`.

    The false-negative rate of a row is the part of its true labels that its set misses: of the labels of an input, or
    of the pixels of an image (each has one true class). Rows without a true label do not count.

    Attributes:
        kind: `"fnr"`.
        alpha: Largest false-negative rate: of its mean over new rows, if `confidence` is None on average over the
            choice of the calibration rows, else with that probability.
        thresholds: Least probability of a label in a set: one, or one for each of `classes`; 0, which all labels reach,
            if there were too few rows.
        rows: Number of calibration rows with a true label behind each.
        outputs: Number of labels or classes.
        classes: Those that the promise is for, in order; others are in no set.
        confidence: Probability that the rate is kept, over the choice of the calibration rows; None: kept on average.
    """

    outputs: int
    classes: tuple[int, ...]
    confidence: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that cannot be applied."""
        super().__post_init__()
        if self.kind not in RISK_KINDS:
            raise ValueError(unknown("kind", str(self.kind), RISK_KINDS))
        if not all(0 <= value <= 1 for value in self.thresholds):
            raise ValueError(f"thresholds {self.thresholds!r:.60} must be probabilities")
        check_confidence(self.confidence)
        if not is_count(self.outputs) or self.classes != checked_classes(self.classes, self.outputs):
            raise ValueError(f"classes {self.classes!r:.60} do not fit outputs={self.outputs!r:.40}")
        if len(self.thresholds) not in (1, len(self.classes)):
            raise ValueError(f"{len(self.thresholds)} thresholds do not fit {len(self.classes)} classes")

    def sets(self, prediction: Any) -> Tensor:
        """Which labels are in the sets, bool in the shape of the probabilities; all of a row that is not finite.

        Args:
            prediction: A `MultiLabelPrediction` or `DenseClassPrediction`, or probabilities [n, labels] or
                [n, *positions, classes].
        """
        probs = as_tensor(getattr(prediction, "probs", prediction))
        if probs.dim() < 2 or probs.shape[-1] != self.outputs:
            raise ValueError(f"probs have shape {list(probs.shape)}; these sets are for [n, ..., {self.outputs}].")
        least = torch.full((self.outputs,), torch.inf, dtype=torch.float64, device=probs.device)
        least[list(self.classes)] = torch.tensor(self.thresholds, dtype=torch.float64, device=probs.device)
        lost = probs.flatten(1).isnan().any(1).view(-1, *[1] * (probs.dim() - 1))
        return (probs.double() >= least) | lost

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> RiskControlledSets:
        """What `to_dict` returned.

        Args:
            given: The values.
        """
        return cls._from({**given, "classes": tuple(given["classes"]) if "classes" in given else ()})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for files."""
        return super().to_dict() | {"classes": list(self.classes)}

    def __repr__(self) -> str:
        sure = "on average" if self.confidence is None else f"with confidence {100 * self.confidence:.6g} %"
        fewest = f"{min(self.rows)} rows" + (" or more of each class" if len(self.rows) > 1 else "")
        low, high = min(self.thresholds), max(self.thresholds)
        least = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
        text = f"at most {100 * self.alpha:.6g} % of a row's true labels missed {sure}, from {fewest}; labels of "
        return f"RiskControlledSets({text}probability {least} or more. {SHIFT})"


def check_confidence(confidence: Any) -> None:
    """Raise ValueError unless it is None or a probability.

    Args:
        confidence: The argument.
    """
    if confidence is not None and (not is_number(confidence) or not 0 < confidence < 1):
        raise ValueError(f"confidence={confidence!r:.40} must lie between 0 and 1, such as 0.95, or be None.")


def checked_classes(given: Any, outputs: int) -> tuple[int, ...]:
    """The labels that count, in order and once each; None means all. Raises ValueError for others than there are.

    Args:
        given: One index, several, or None.
        outputs: Number of labels or classes.
    """
    several = given.tolist() if hasattr(given, "tolist") else given
    several = several if isinstance(several, Iterable) else [several]
    listed = list(range(outputs)) if given is None else list(several)
    if not listed or not all(is_count(index, least=0) and index < outputs for index in listed):
        raise ValueError(f"classes={given!r:.60} must be indices from 0 to {outputs - 1}, at least one.")
    return tuple(sorted({int(index) for index in listed}))
