"""The [training] section of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from credo.core.errors import unknown
from credo.experiments.options import NONE, check_types
from credo.training.hardware.precision import PRECISIONS
from credo.training.schedule import Schedule, make_schedule

# Options that are None by default: or whole numbers, or any.
_COUNTS = ("patience", "examples", "checkpoint_every")
_NUMBERS = ("warmup",)


@dataclass(frozen=True)
class Training:
    """The [training] section.

    Attributes:
        epochs: Passes over the training data; 0 leaves the given weights as they are.
        batch_size: Examples in a step, over all processes.
        schedule: Learning-rate schedule: `"cosine"`, `"constant"`, `"steps"` or `"plateau"`.
        milestones: Epochs at which `"steps"` lowers the rate.
        decay: Factor of `"steps"` and `"plateau"`.
        floor: Lowest rate of `"cosine"` and `"plateau"`, as a fraction of `lr`.
        warmup: Epochs of linear warm-up; None: a twentieth of `epochs` for `"cosine"`, else 0.
        wait: Epochs without improvement before `"plateau"` lowers the rate.
        augment: Name of a data augmentation, or `"none"`.
        examples: Number of training examples to use, stratified by class; None uses all.
        validation: Fraction or number of training examples to hold out; 0 for none.
        conformal: Fraction or number of training examples to hold out for conformal prediction alone; 0 for none.
        validation_draws: Weight draws of a validation.
        monitor: Validation metric for early stopping and `"plateau"`.
        patience: Epochs without improvement before early stopping; None trains all epochs.
        calibrate: Choose the scale of the noise and the temperature on the validation examples after training.
        checkpoint_every: Steps between checkpoints within an epoch; does not change results.
        checkpoint_minutes: Minutes between checkpoints; 0 for none by time.
        seed: Seed of everything.
        device: Where the network is: `"auto"` (an accelerator if there is one), `"cpu"`, `"cuda"`, `"cuda:1"`, `"mps"`.
        precision: Of the passes in steps: `"float32"`, `"bfloat16"` or `"float16"`.
        channels_last: Lay out images with the channels last in memory.
        compile: Compile the network's passes in steps.
    """

    epochs: int = 20
    batch_size: int = 128
    schedule: str = "cosine"
    milestones: list[float] = field(default_factory=list)
    decay: float = 0.1
    floor: float = 0.0
    warmup: float | None = None
    wait: int = 6
    augment: str = "none"
    examples: int | None = None
    validation: float = 0.1
    conformal: float = 0.0
    validation_draws: int = 8
    monitor: str = "nll"
    patience: int | None = None
    calibrate: bool = False
    checkpoint_every: int | None = None
    checkpoint_minutes: float = 10.0
    seed: int = 0
    device: str = "auto"
    precision: str = "float32"
    channels_last: bool = False
    compile: bool = False

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
    """Validate the section."""
    known = {f.name: f.default for f in fields(Training)}
    # None (in JSON) and "none" (in TOML) mean the default.
    table = {k: v for k, v in table.items() if v is not None and not (v == NONE and known.get(k, NONE) is None)}
    for key in table:
        if key not in known:
            raise ValueError(unknown("training option", key, known))
    check_types("training", table, {**asdict(Training()), **dict.fromkeys(_COUNTS, 1), **dict.fromkeys(_NUMBERS, 1.0)})
    training = Training(**table)
    for name, least in (("epochs", 0), ("batch_size", 1)):
        if getattr(training, name) < least:
            raise ValueError(f"training.{name}={getattr(training, name)}: at least {least}.")
    if training.checkpoint_every is not None and training.checkpoint_every < 1:
        raise ValueError(f"training.checkpoint_every={training.checkpoint_every}: at least 1 step, or none.")
    if not 0 <= training.checkpoint_minutes < float("inf"):
        raise ValueError(f"training.checkpoint_minutes={training.checkpoint_minutes}: 0 (not by time) or more.")
    training.make_schedule()
    if training.precision not in PRECISIONS:
        raise ValueError(unknown("training.precision", training.precision, PRECISIONS))
    if training.schedule == "plateau" and not training.validation:
        raise ValueError("training.schedule=plateau follows validation data: set training.validation above 0.")
    if training.calibrate and not training.validation:
        raise ValueError("training.calibrate=true needs validation data: set training.validation above 0.")
    return training
