"""The [training] section of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from credo.core.errors import unknown
from credo.experiments.defaults import NONE
from credo.experiments.type_checks import check_kinds
from credo.training.schedule import Schedule, make_schedule

# Options that are none by default, else whole numbers.
_COUNTS = ("patience", "examples", "checkpoint_every")


@dataclass(frozen=True)
class Training:
    """How long and in what steps. Times (`milestones`, `warmup`) are in epochs; `validation` is a share or a count.

    `examples`: train on that many only, chosen by the seed, every class at its share. `batch_size` is that of all
    processes together, where several train. `checkpoint_every` (steps) and `checkpoint_minutes` change no numbers.
    """

    epochs: int = 20
    batch_size: int = 128
    schedule: str = "constant"
    milestones: list[float] = field(default_factory=list)
    decay: float = 0.1
    floor: float = 0.0
    warmup: float = 0.0
    wait: int = 6
    augment: str = "none"
    examples: int | None = None
    validation: float = 0.1
    validation_draws: int = 8
    monitor: str = "nll"
    patience: int | None = None
    checkpoint_every: int | None = None
    checkpoint_minutes: float = 10.0
    seed: int = 0

    def make_schedule(self) -> Schedule:
        """The learning-rate schedule."""
        return make_schedule(
            self.schedule,
            epochs=self.epochs,
            milestones=self.milestones,
            decay=self.decay,
            floor=self.floor,
            warmup=self.warmup,
            wait=self.wait,
        )


def make_training(table: Mapping[str, Any]) -> Training:
    """The section with every key checked."""
    known = {f.name: f.default for f in fields(Training)}
    # A JSON record's null, and a TOML record's word for it, are the default.
    table = {k: v for k, v in table.items() if v is not None and not (v == NONE and known.get(k, NONE) is None)}
    for key in table:
        if key not in known:
            raise ValueError(unknown("training option", key, known))
    check_kinds("training", table, {**asdict(Training()), **dict.fromkeys(_COUNTS, 1)})
    training = Training(**table)
    for name in ("epochs", "batch_size"):
        if getattr(training, name) < 1:
            raise ValueError(f"training.{name}={getattr(training, name)}: at least 1.")
    if training.checkpoint_every is not None and training.checkpoint_every < 1:
        raise ValueError(f"training.checkpoint_every={training.checkpoint_every}: at least 1 step, or none.")
    if not 0 <= training.checkpoint_minutes < float("inf"):
        raise ValueError(f"training.checkpoint_minutes={training.checkpoint_minutes}: 0 (not by time) or more.")
    training.make_schedule()
    if training.schedule == "plateau" and not training.validation:
        raise ValueError("training.schedule=plateau follows validation data: set training.validation above 0.")
    return training
