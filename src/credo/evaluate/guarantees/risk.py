"""Conformal risk control: sets of labels that miss at most a stated part of the true ones (Angelopoulos et al. 2024).

A set has all labels of probability t or more. The false-negative rate of a row never falls as t grows, so the largest t
whose calibration rows lose no more than `loss_budget` is taken: it is a probability of one of their true labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from credo.core.errors import FewRowsWarning
from credo.core.held_out.conformal_inputs import as_tensor
from credo.core.held_out.risk_bounds import loss_budget, rows_for
from credo.core.held_out.risk_sets import RiskControlledSets, check_confidence, checked_classes
from credo.core.likelihood.classes import IGNORED
from credo.core.support.user_warnings import warn
from credo.predict import DenseClassPrediction

# Sums of fractions are not exact: a third of a row three times is a row.
_ROUNDING = 1e-9


def risk_sets(
    prediction: Any,
    y: Any,
    alpha: float,
    *,
    confidence: float | None,
    classes: Any,
    ignore_index: int | None,
    by_class: bool,
) -> RiskControlledSets:
    """The sets of kind `"fnr"`; arguments as in `credo.conformal`.

    Args:
        prediction: A prediction of labels or of classes at positions, or probabilities.
        y: Its targets; None takes those of the prediction.
        alpha: Largest false-negative rate.
        confidence: Probability that it is kept.
        classes: Those that count.
        ignore_index: Label of positions that do not count.
        by_class: One threshold for each class.
    """
    check_confidence(confidence)
    probs, targets = _rows(prediction, y, ignore_index)
    counted = checked_classes(classes, probs.shape[-1])
    groups = [(label,) for label in counted] if by_class else [counted]
    is_labels = targets.shape == probs.shape
    is_binary = is_labels and probs.dim() == 2 and len(groups[0]) == 1
    found = [_threshold(*_true_ones(probs, targets, group), alpha, confidence, is_binary) for group in groups]
    rows = tuple(count for _, count in found)
    needed = rows_for(alpha, confidence)
    few = [group for group, count in zip(groups, rows, strict=True) if count < needed]
    if few:
        which = f" of classes {', '.join(str(group[0]) for group in few[:5])}" if by_class else ""
        sure = "" if confidence is None else f" and confidence={confidence:g}"
        warn(
            f"{min(rows)} calibration rows with a true label{which} are too few for alpha={alpha:g}{sure}, which "
            f"needs {needed}: sets have all these labels.",
            FewRowsWarning,
        )
    thresholds = tuple(value for value, _ in found)
    return RiskControlledSets("fnr", alpha, thresholds, rows, probs.shape[-1], counted, confidence)


def _rows(prediction: Any, y: Any, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """Probabilities, and either 0 or 1 for each or the class of each position, −1 where it does not count."""
    probs = as_tensor(getattr(prediction, "probs", prediction)).cpu()
    if probs.dim() < 2 or not probs.is_floating_point() or not len(probs):
        raise ValueError(f"probs have shape {list(probs.shape)}; pass [n, labels] or [n, *positions, classes].")
    if not bool(((probs >= 0) & (probs <= 1)).all()):
        raise ValueError("Probabilities of the calibration rows must lie between 0 and 1; leave NaN rows out.")
    targets = as_tensor(y).cpu()
    if targets.shape == probs.shape:
        if not bool(((targets == 0) | (targets == 1)).all()):
            raise ValueError("Targets of labels are 0 or 1, one for each probability: leave unknown rows out.")
        return probs, targets.bool()
    if targets.shape != probs.shape[:-1] or targets.dim() < 2 or targets.is_floating_point():
        raise ValueError(
            f"y has shape {list(targets.shape)} and {targets.dtype} for probabilities {list(probs.shape)}; pass 0 or 1 "
            "for each label, in their shape, or whole numbers [n, *positions], the class of each position. For one "
            "class of each row use kind='lac'."
        )
    return probs, _positions(prediction, targets, probs.shape[-1], ignore_index)


def _positions(prediction: Any, targets: Tensor, classes: int, ignore_index: int | None) -> Tensor:
    if ignore_index is not None and (isinstance(ignore_index, bool) or not isinstance(ignore_index, int)):
        raise ValueError(f"ignore_index={ignore_index!r:.40} must be a whole number.")
    ignored = targets == (IGNORED if ignore_index is None else ignore_index)
    if isinstance(prediction, DenseClassPrediction) and prediction.log_likelihood is not None:
        ignored |= prediction.log_likelihood.cpu().isnan()  # by the likelihood's own index
    wrong = targets[~ignored & ((targets < 0) | (targets >= classes))]
    if len(wrong):
        raise ValueError(
            f"y has the label {int(wrong[0])}, but there are {classes} classes, counted from 0; if it means that a "
            f"position does not count, give ignore_index={int(wrong[0])}."
        )
    return targets.long().masked_fill(ignored, -1)


def _true_ones(probs: Tensor, targets: Tensor, group: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Probabilities of all true labels of a group, and the number of the row of each."""
    if targets.dtype == torch.bool:
        mask = targets[..., list(group)]
        return probs[..., list(group)][mask].double(), mask.nonzero()[:, 0]
    mask = torch.isin(targets, torch.tensor(group))
    own = probs.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return own[mask].double(), mask.nonzero()[:, 0]


def _threshold(own: Tensor, row: Tensor, alpha: float, confidence: float | None, is_binary: bool) -> tuple[float, int]:
    """The largest t for which the rows lose no more than they may, and how many rows there are."""
    counts = torch.bincount(row)
    rows = int((counts > 0).sum())
    budget = loss_budget(rows, alpha, confidence, is_binary=is_binary)
    if budget < 0 or not rows:
        return 0.0, rows
    ordered, order = own.sort()
    lost = (1.0 / counts.double())[row[order]].cumsum(0)  # by a threshold above each
    first = int((lost > budget + _ROUNDING).nonzero()[0])
    return float(ordered[first]), rows
