"""Accuracy and NLL against the fraction of pruned weights, without retraining."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from credo.compress.prune import check_prunable, prune
from credo.core.posterior import Posterior
from credo.evaluate.suite import quick_metrics
from credo.predict import predict

RATES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98)


@dataclass(frozen=True)
class SweepPoint:
    """Result at one pruning rate.

    Attributes:
        rate: Fraction of pruned weights.
        kept: Number of weights that are not pruned.
        metrics: Accuracy (RMSE for regression) and NLL.
    """

    rate: float
    kept: int
    metrics: dict[str, float]


def sweep(
    posterior: Posterior,
    batches: Iterable[Any],
    rates: Sequence[float] = RATES,
    *,
    draws: int = 32,
    seed: int = 0,
    **options: Any,
) -> list[SweepPoint]:
    """Prune a copy of the posterior at each rate and evaluate it.

    Args:
        posterior: The posterior, which is not changed.
        batches: Batches of (inputs, targets), iterated once per rate.
        rates: Fractions to prune.
        draws: Weight draws of a prediction; 1 evaluates single networks.
        seed: Seed of the draws.
        **options: Options of `prune` (`by`, `scope`, `structure`, `parameters`).
    """
    check_prunable(posterior)
    if iter(batches) is batches:
        raise ValueError("The batches are iterated once per rate: give a list or a loader, not an iterator.")
    return [_point(posterior, batches, rate, draws, seed, options) for rate in rates]


def _point(
    posterior: Posterior, batches: Iterable[Any], rate: float, draws: int, seed: int, options: dict[str, Any]
) -> SweepPoint:
    pruned = copy.deepcopy(posterior)
    masks = prune(pruned, rate=rate, **options)
    metrics = quick_metrics(predict(pruned, batches, draws=draws, seed=seed))
    return SweepPoint(rate, sum(int(mask.sum()) for mask in masks.values()), metrics)
