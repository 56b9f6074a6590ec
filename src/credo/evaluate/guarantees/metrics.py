"""Coverage and size of sets of classes, coverage and width of intervals, with 95 % intervals over the rows.

Tensors and arrays of numpy are alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from credo.core.held_out.conformal_inputs import as_tensor, one_label
from credo.core.support.binomial import beta_quantile
from credo.evaluate.checks import check_labels
from credo.evaluate.intervals import bootstrap


def set_metrics(sets: Tensor, labels: Tensor) -> dict[str, Any]:
    """Coverage, mean size, the fraction of sets of one class and of empty ones, and the least covered class.

    Args:
        sets: Which classes are in the set of each row, bool [n, classes].
        labels: Class indices [n].
    """
    sets, labels = as_tensor(sets).cpu().bool(), one_label(as_tensor(labels).cpu())
    if sets.dim() != 2 or not len(sets):
        raise ValueError(f"sets have shape {list(sets.shape)}; pass [n, classes].")
    labels = check_labels(labels, batch=len(sets), classes=sets.shape[1], device=sets.device)
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
    lower, upper, targets = (as_tensor(part).cpu().double() for part in (lower, upper, targets))
    if not lower.shape == upper.shape == targets.shape or not len(lower):
        shapes = [list(part.shape) for part in (lower, upper, targets)]
        raise ValueError(f"lower, upper and targets have the shapes {shapes}; make them alike.")
    lower, upper, targets = (part.reshape(len(part), -1) for part in (lower, upper, targets))
    inside = ((lower <= targets) & (targets <= upper)).all(1).double()
    widths = (upper - lower).mean(1)
    found: dict[str, Any] = {"coverage": float(inside.mean()), "width": float(widths.mean())}
    intervals = {"coverage": fraction_interval(int(inside.sum()), len(inside))}
    if bool(widths.isfinite().all()):
        intervals["width"] = _ends(widths)
    return {**found, "intervals": intervals}


def risk_metrics(sets: Tensor, targets: Tensor) -> dict[str, Any]:
    """False-negative rate, the mean over rows of the part of their true labels that is not in their sets, and size.

    Rows without a true label do not count. `fnr_by_class` has the rate of each label by itself, which is what counts
    if the sets are for some of the labels only; None for a label that no row has.

    Args:
        sets: Which labels are in the sets, bool [n, labels] or [n, *positions, classes].
        targets: 0 or 1 in the same shape, or classes [n, *positions]; those below 0 do not count.
    """
    sets, targets = as_tensor(sets).cpu().bool(), as_tensor(targets).cpu()
    if targets.shape not in (sets.shape, sets.shape[:-1]) or sets.dim() < 2 or not len(sets):
        raise ValueError(f"sets have shape {list(sets.shape)}, targets {list(targets.shape)}; they do not fit.")
    if targets.shape == sets.shape:
        true = targets > 0.5
    else:
        true = torch.nn.functional.one_hot(targets.long().clamp_min(0), sets.shape[-1]).bool()
        true &= (targets >= 0).unsqueeze(-1)
    rates = _miss_rates(sets, true)
    by_class = [_miss_rates(sets[..., k], true[..., k]) for k in range(sets.shape[-1])]
    sizes = sets.sum(-1).double().reshape(len(sets), -1).mean(1)
    return {
        "fnr": float(rates.mean()) if len(rates) else None,
        "fnr_by_class": [float(each.mean()) if len(each) else None for each in by_class],
        "size": float(sizes.mean()),
        "intervals": {"size": _ends(sizes), **({"fnr": _ends(rates)} if len(rates) else {})},
    }


def _miss_rates(sets: Tensor, true: Tensor) -> Tensor:
    """Of each row [n, …] that has any true label."""
    sets, true = sets.reshape(len(sets), -1), true.reshape(len(true), -1)
    count = true.sum(1)
    return ((true & ~sets).sum(1).double() / count)[count > 0]


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
