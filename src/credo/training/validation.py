"""Validation after an epoch: metrics, and whether they are the best so far."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from credo.core.errors import unknown
from credo.core.posterior import Posterior
from credo.core.sampling import while_training
from credo.evaluate.suite import quick_metrics
from credo.predict import predict
from credo.training.rank_zero import from_first
from credo.training.state import Progress

# Larger is better after multiplying by the sign.
MONITORS = {"accuracy": 1.0, "nll": -1.0, "rmse": -1.0}


def validate(posterior: Posterior, batches: Iterable[Any] | None, draws: int, epoch: int) -> dict[str, float]:
    """Return metrics on held-out data; when distributed, ranks share the batches and get the same numbers.

    Args:
        posterior: The posterior.
        batches: Held-out batches; None gives no metrics.
        draws: Draws of the prediction.
        epoch: Seed of the prediction.
    """
    if batches is None:
        return {}
    if posterior.process_group is None:
        with while_training():
            return quick_metrics(predict(posterior, batches, draws=draws, seed=epoch))
    with while_training(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(epoch)  # a loader that shuffles must do so alike on every rank
        metrics = quick_metrics(predict(posterior, batches, draws=draws, seed=epoch, shard="data"))
    # Early stopping and rates depend on these: rounding differences must not make ranks diverge.
    return from_first(posterior.process_group, metrics)


def update_best(
    posterior: Posterior, progress: Progress, metrics: dict[str, float], monitor: str, *, keep: bool
) -> bool:
    """Update the best score and the epochs since; return whether this epoch is the best so far.

    Args:
        posterior: The posterior.
        progress: Is updated.
        metrics: Of this epoch; empty without validation.
        monitor: Name of the metric.
        keep: Whether to remember the posterior's state of the best epoch.
    """
    if not metrics:
        return False
    if monitor not in metrics:
        raise ValueError(unknown("monitor", monitor, metrics))
    score = MONITORS[monitor] * metrics[monitor]
    if not score > progress.best_score:
        progress.bad_epochs += 1
        return False
    progress.best_score, progress.bad_epochs = score, 0
    if keep:
        progress.best_state = _cloned(posterior.state_dict())
    return True


def scores(records: list[dict[str, Any]], monitor: str) -> list[float]:
    """Return the monitored metric of each epoch, signed so that larger is better."""
    return [MONITORS[monitor] * record["validation"][monitor] for record in records]


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cloned(entry) for entry in value)
    return value
