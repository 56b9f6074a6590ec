"""How accuracy and NLL change with the share of pruned weights, without training again."""

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
    """What is left at one rate: how many weights are not zero, and accuracy (RMSE for regression) and NLL."""

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
    """Prune copies of one posterior at each rate and measure them; the posterior stays as it is.

    `batches` of (inputs, targets) are read once for each rate. `options` are those of `prune` (`by`, `scope`,
    `structure`, `parameters`). With `draws=1` it is about single networks, with many about their mixture.
    """
    check_prunable(posterior)
    if iter(batches) is batches:
        raise ValueError("The batches are read once for each rate: give a list or a loader, not an iterator.")
    return [_point(posterior, batches, rate, draws, seed, options) for rate in rates]


def _point(
    posterior: Posterior, batches: Iterable[Any], rate: float, draws: int, seed: int, options: dict[str, Any]
) -> SweepPoint:
    pruned = copy.deepcopy(posterior)
    masks = prune(pruned, rate=rate, **options)
    metrics = quick_metrics(predict(pruned, batches, draws=draws, seed=seed))
    return SweepPoint(rate, sum(int(mask.sum()) for mask in masks.values()), metrics)
