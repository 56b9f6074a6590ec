"""Metrics of predictions that are neither one class nor a Gaussian value: pixels, several labels, times, quantiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from credo.evaluate.calibration import ece
from credo.evaluate.detection import auroc
from credo.predict import DenseClassPrediction, MultiLabelPrediction, QuantilePrediction


def mean_iou(labels: Tensor, targets: Tensor, classes: int) -> float:
    """Mean over classes of intersection over union; classes that neither has are left out.

    Args:
        labels: Predicted class of each position, any shape.
        targets: True classes, of the same shape; labels below 0 or beyond the classes do not count.
        classes: Number of classes.
    """
    if labels.shape != targets.shape:
        raise ValueError(f"labels have shape {list(labels.shape)}, targets {list(targets.shape)}; pass the same.")
    counts = (targets >= 0) & (targets < classes)
    pairs = targets[counts].long() * classes + labels[counts].long()
    table = torch.bincount(pairs, minlength=classes**2).reshape(classes, classes).double()
    union = table.sum(0) + table.sum(1) - table.diag()
    return float((table.diag() / union)[union > 0].mean())


def concordance(times: Tensor, observed: Tensor, predicted: Tensor) -> float:
    """Harrell's index: of all pairs whose order is known, the share that predictions order rightly; ties count half.

    A pair is known if the shorter time is an observed event. 0.5 is chance.

    Args:
        times: Times until event or censoring, [n].
        observed: 1 where the event was observed, else 0, [n].
        predicted: Predicted times, [n], such as medians.
    """
    times, observed, predicted = (value.double().flatten() for value in (times, observed, predicted))
    if not len(times) == len(observed) == len(predicted):
        raise ValueError(f"got {len(times)} times, {len(observed)} marks and {len(predicted)} predictions.")
    right = known = 0.0
    for time, mark, own in zip(times, observed, predicted, strict=True):
        if not mark:
            continue
        later = (times > time) | ((times == time) & (observed == 0))
        known += float(later.sum())
        right += float((predicted[later] > own).sum()) + 0.5 * float((predicted[later] == own).sum())
    if not known:
        raise ValueError("No pair of times has a known order: there is no event before another time.")
    return right / known


def label_metrics(prediction: MultiLabelPrediction, targets: Tensor) -> dict[str, Any]:
    """Of several labels: averages over all labels, and of each by itself where it is asked for.

    Args:
        prediction: With targets.
        targets: 0 or 1, like the probabilities.
    """
    truth, flat = (targets > 0.5).flatten(1), prediction.probs.flatten(1)
    known = torch.ones_like(truth) if prediction.known is None else prediction.known.flatten(1)
    right = (prediction.labels.flatten(1) == truth) | ~known
    both = torch.stack([1 - flat, flat], -1)
    aurocs = [
        auroc(p[k & t].double(), p[k & ~t].double())
        for p, t, k in zip(flat.T, truth.T, known.T, strict=True)
        if bool((k & t).any()) and bool((k & ~t).any())
    ]
    return {
        "exact_match": float(right.all(1)[known.any(1)].double().mean()),
        "brier": float((flat - truth.to(flat)).square()[known].double().mean()),
        "ece": ece(both[known], truth[known].long()),
        "macro_auroc": sum(aurocs) / len(aurocs) if aurocs else float("nan"),
        "mean_total": float(prediction.total.mean()),
        "mean_aleatoric": float(prediction.aleatoric.mean()),
        "mean_epistemic": float(prediction.epistemic.mean()),
        "mean_draws": float(prediction.draws_used.float().mean()),
    }


def position_metrics(prediction: DenseClassPrediction, targets: Tensor) -> dict[str, Any]:
    """Beside those of classes, over all positions that count.

    Args:
        prediction: With targets.
        targets: Labels of the positions.
    """
    return {"mean_iou": mean_iou(prediction.labels, counted(prediction, targets), prediction.probs.shape[-1])}


def counted(prediction: DenseClassPrediction, targets: Tensor) -> Tensor:
    """The labels of the positions, −1 where they do not count.

    Args:
        prediction: With targets.
        targets: Labels of the positions.
    """
    counts = ~prediction.log_likelihood.isnan() if prediction.log_likelihood is not None else targets >= 0
    return torch.where(counts, targets, -1)


def quantile_metrics(prediction: QuantilePrediction, targets: Tensor) -> dict[str, Any]:
    """Pinball losses, and the share of targets below each quantile, ideally its level.

    Args:
        prediction: With targets.
        targets: [n, targets].
    """
    below = (targets.unsqueeze(-1) <= prediction.quantiles).double().flatten(0, 1).mean(0)
    pinball = prediction.pinball().double().mean(0)
    return {
        "pinball": float(pinball.mean()),
        "pinball_by_level": {f"{k:g}": float(v) for k, v in zip(prediction.levels, pinball, strict=True)},
        "below": {f"{k:g}": float(v) for k, v in zip(prediction.levels, below, strict=True)},
        "mean_epistemic": float(prediction.epistemic.mean()),
        "mean_draws": float(prediction.draws_used.float().mean()),
    }
