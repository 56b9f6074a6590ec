"""Send the records of a training to TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from credo.training.loop import EpochRecord


def log_to(logger: Any) -> Callable[[EpochRecord], None]:
    """Return a function that logs the numbers of a record: `for record in credo.train(...): log(record)`.

    Args:
        logger: A `SummaryWriter` of TensorBoard, a run of `wandb.init()`, or the module `mlflow`. Raises TypeError for
            anything that has none of `add_scalar`, `log_metrics` and `log`.
    """
    if hasattr(logger, "add_scalar"):
        return partial(_add_scalars, logger)
    if hasattr(logger, "log_metrics"):
        return lambda record: logger.log_metrics(_numbers(record), step=record.epoch)
    if hasattr(logger, "log"):
        return lambda record: logger.log(_numbers(record), step=record.epoch)
    raise TypeError(
        f"{type(logger).__name__} is no logger: give a SummaryWriter of TensorBoard, a run of Weights & Biases or the "
        "module mlflow."
    )


def _add_scalars(writer: Any, record: EpochRecord) -> None:
    for name, value in _numbers(record).items():
        writer.add_scalar(name, value, record.epoch)


def _numbers(record: EpochRecord) -> dict[str, float]:
    values = dataclasses.asdict(record)
    found = {"train": values, "validation": values.pop("validation") or {}}
    return {
        f"{part}/{name}": float(value)
        for part, numbers in found.items()
        for name, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "epoch"
    }
