"""Coverage and size of sets of classes, coverage and width of intervals, with 95 % intervals over the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from credo.core.support.binomial import beta_quantile
from credo.evaluate.intervals import bootstrap


def set_metrics(sets: Tensor, labels: Tensor) -> dict[str, Any]:
    """Coverage, mean size, the fraction of sets of one class and of empty ones, and the least covered class.

    Args:
        sets: Which classes are in the set of each row, bool [n, classes].
        labels: Class indices [n].
    """
    if sets.dim() != 2 or len(sets) != len(labels) or not len(sets):
        raise ValueError(f"sets have shape {list(sets.shape)} for {len(labels)} labels; pass [n, classes] and [n].")
    sets, labels = sets.cpu().bool(), labels.cpu().long()
    inside = sets.gather(1, labels.unsqueeze(1)).squeeze(1).double()
    sizes = sets.sum(1).double()
    count = torch.bincount(labels, minlength=sets.shape[1])
    by_class = (torch.bincount(labels, weights=inside, minlength=sets.shape[1]) / count)[count > 0]
    return {
        "coverage": float(inside.mean()),
        "size": float(sizes.mean()),
        "singletons": float((sizes == 1).double().mean()),
        "empty": float((sizes == 0).double().mean()),
        "worst_class_coverage": float(by_class.min()),
        "sizes": torch.bincount(sizes.long(), minlength=sets.shape[1] + 1).tolist(),
        "intervals": {"coverage": fraction_interval(int(inside.sum()), len(inside)), "size": _ends(sizes)},
    }


def interval_metrics(lower: Tensor, upper: Tensor, targets: Tensor) -> dict[str, Any]:
    """Coverage, of all outputs together, and mean width.

    Args:
        lower: Lower ends, [n] or [n, outputs].
        upper: Upper ends.
        targets: Targets in the same shape.
    """
    if not lower.shape == upper.shape == targets.shape or not len(lower):
        shapes = [list(part.shape) for part in (lower, upper, targets)]
        raise ValueError(f"lower, upper and targets have the shapes {shapes}; make them alike.")
    lower, upper, targets = (part.cpu().double().reshape(len(part), -1) for part in (lower, upper, targets))
    inside = ((lower <= targets) & (targets <= upper)).all(1).double()
    widths = (upper - lower).mean(1)
    found: dict[str, Any] = {"coverage": float(inside.mean()), "width": float(widths.mean())}
    intervals = {"coverage": fraction_interval(int(inside.sum()), len(inside))}
    if bool(widths.isfinite().all()):
        intervals["width"] = _ends(widths)
    return {**found, "intervals": intervals}


def fraction_interval(count: int, rows: int, level: float = 0.95) -> list[float]:
    """The exact interval of a fraction (Clopper and Pearson 1934).

    Args:
        count: Number of rows that count.
        rows: Number of rows.
        level: Confidence level.
    """
    tail = (1 - level) / 2
    return [beta_quantile(tail, count, rows - count + 1), beta_quantile(1 - tail, count + 1, rows - count)]


def _ends(values: Tensor) -> list[float]:
    found = bootstrap(values)
    return [found.low, found.high]
