"""The sections of an experiment on a stream, with their defaults."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class StreamTasks:
    """The [continual] section of a stream.

    Attributes:
        tasks: `"split"`: groups of classes; `"permuted"`: input features in another order for each; `"datasets"`: the
            data set of [data], and each of `others`.
        count: Number of tasks of `"split"` and `"permuted"`.
        others: Names of the further data sets of `"datasets"`, which share inputs and labels with the first.
        features: Run folder of a trained network: the inputs of its last linear layer take the place of images.
        order: Which task comes when, counted from 0; None: each once.
        held_out: Last training rows of each data set that are not learned; the temperature is chosen on them.
        evaluate: `"test"` rows, or `"held-out"` rows for choosing settings.
        prior: Standard deviation of the first prior of `forgetting = "posterior"`.
        draws: Weight draws of its predictions.
    """

    tasks: str = "split"
    count: int = 5
    others: list[str] | None = None
    features: str | None = None
    order: list[int] | None = None
    held_out: int = 0
    evaluate: str = "test"
    prior: float = 1.0
    draws: int = 8


@dataclass(frozen=True)
class StreamMethod:
    """The [method] section of a stream: options of `HybridFlow`, `StreamLearner` and `TaskDetector`.

    Attributes:
        name: `"hybrid-flow"`.
        forgetting: `"functional"`, `"replay"`, `"posterior"`, `"buffer"`, `"nothing"`, or `"joint"`: all tasks mixed.
        posterior: Method of `"posterior"`: `"bbb"` or `"vogn"`.
    """

    name: str = "hybrid-flow"
    forgetting: str = "functional"
    posterior: str = "bbb"
    strength: float = 1.0
    lr: float = 1e-3
    warm_up: int = 50
    decay: float | None = None
    replays: float = 1.0
    clip: float = 100.0
    buffer: int = 500
    couplings: int = 8
    hidden: int = 256
    layers: int = 2
    scale: float = 2.0
    order: str = "permuted"
    actnorm: bool = False
    squeeze: float = 0.0
    low: int = 0
    radius: float | None = None
    noise: float = 0.2
    window: int = 100
    threshold: float = 5.0
    known_threshold: float | None = None
    consecutive: int = 2
    burn_in: int = 30


@dataclass(frozen=True)
class StreamTraining:
    """The [training] section of a stream.

    Attributes:
        epochs: Passes over the examples of a task each time that it comes.
        batch_size: Examples in a batch.
        seed: Seed of everything.
    """

    epochs: int = 10
    batch_size: int = 128
    seed: int = 0


@dataclass(frozen=True)
class StreamExperiment:
    """The sections of an experiment on a stream."""

    continual: StreamTasks
    method: StreamMethod
    training: StreamTraining
    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, as in the TOML file."""
        return asdict(self)
