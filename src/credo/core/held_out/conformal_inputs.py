"""What conformal prediction accepts as a prediction: this library's predictions, and plain arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credo.core.support.validate import is_number


def check_alpha(alpha: Any) -> float:
    """Return alpha; raise ValueError unless it is a probability of a miss.

    Args:
        alpha: The argument.
    """
    if not is_number(alpha) or not 0 < alpha < 1:
        raise ValueError(f"alpha={alpha!r:.40} must lie between 0 and 1: 0.1 for sets that miss 10 % of the labels.")
    return float(alpha)


def both_classes(probs: Tensor) -> Tensor:
    """Probabilities [n, 2] of no and yes from those of a yes, [n]; others as they are.

    Args:
        probs: Class probabilities [n, classes], or [n].
    """
    return torch.stack([1 - probs, probs], -1) if probs.dim() == 1 else probs


def one_label(labels: Tensor) -> Tensor:
    """Labels [n] of those in a column [n, 1], and whole numbers of truth values; others as they are.

    Args:
        labels: Class indices.
    """
    column = labels.squeeze(1) if labels.dim() == 2 and labels.shape[1] == 1 else labels
    return column.long() if column.dtype == torch.bool else column


def value_parts(prediction: Any, kind: str) -> tuple[Tensor, Tensor | None]:
    """The float64 tensors that a kind of interval needs; raises ValueError for others.

    Args:
        prediction: As in `ConformalIntervals.intervals`.
        kind: `"split"`, `"normalised"` or `"cqr"`.
    """
    is_prediction = hasattr(prediction, "mean") and hasattr(prediction, "total")
    if kind == "cqr":
        if is_prediction or not isinstance(prediction, tuple) or len(prediction) != 2:
            raise ValueError("kind='cqr' needs quantiles that were predicted: pass the tuple (lower, upper).")
        lower, upper = _alike(*prediction)
        if len(lower) and bool((lower > upper).all()):
            raise ValueError("all lower quantiles are above the upper ones; pass (lower, upper) in this order.")
        return lower, upper
    parts = (prediction.mean, prediction.total) if is_prediction else prediction
    is_pair = isinstance(parts, tuple) and len(parts) == 2
    if kind == "split":
        return numbers(parts[0] if is_pair else parts), None
    if not is_pair:
        raise ValueError("kind='normalised' needs a regression prediction, or the tuple (means, standard deviations).")
    mean, std = _alike(*parts)
    if bool((std < 0).any()):
        raise ValueError("standard deviations are negative; pass (means, standard deviations) in this order.")
    return mean, std


def numbers(values: Any) -> Tensor:
    """An array as a float64 tensor on the CPU.

    Args:
        values: A tensor or what numpy can read.
    """
    return as_tensor(values).cpu().double()


def as_tensor(values: Any) -> Tensor:
    """A tensor detached, any other array as a copy of its own; raises ValueError for what is not numbers.

    Args:
        values: A tensor or what numpy can read: arrays that are read-only or reversed, lists, columns of a table.
    """
    if isinstance(values, Tensor):
        return values.detach()
    try:
        array = np.array(values)
    except ValueError as error:
        raise ValueError(f"an array of numbers is needed, and rows of one length: {error}") from error
    if array.dtype.kind not in "bfiu":
        raise ValueError(f"an array of numbers is needed, got {type(values).__name__} {values!r:.40}.")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def outputs_of(values: Tensor) -> int:
    """Number of targets of each row.

    Args:
        values: Means or targets, [n] or [n, outputs].
    """
    return 1 if values.dim() == 1 else math.prod(values.shape[1:])


def _alike(first: Any, second: Any) -> tuple[Tensor, Tensor]:
    one, other = numbers(first), numbers(second)
    if one.shape != other.shape:
        raise ValueError(f"two arrays have the shapes {list(one.shape)} and {list(other.shape)}; make them alike.")
    return one, other
