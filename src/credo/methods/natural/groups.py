"""Groups of arguments of natural-gradient methods: momentum, curvature, and a temperature that warms up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from credo.core.arguments import Group, Replaced
from credo.core.support.validate import checked_count, is_number


@dataclass(frozen=True)
class Momentum(Group):
    """The momentum of VOGN, OGN, K-FAC and noisy K-FAC.

    Attributes:
        decay: Weight β₁ of the old momentum.
        averaged: Make the momentum an average (with debiasing) instead of a sum; not for K-FAC.
        correction: Rescale a summed momentum when the learning rate changes, so that its part of a step stays as long.
    """

    argument: ClassVar[str] = "momentum"
    short: ClassVar[str] = "decay"

    decay: float = 0.9
    averaged: bool = False
    correction: bool = True

    def __post_init__(self) -> None:
        check_decay("momentum.decay", self.decay)
        check_flags(self, "averaged", "correction")


@dataclass(frozen=True)
class Curvature(Group):
    """The diagonal curvature of VOGN and OGN.

    Attributes:
        decay: Weight β of the *old* curvature, as in Adam. None: `fit` chooses it so that the average spans a twentieth
            of the training; 0.999 in a loop of your own (the β₂ of Osawa et al. 2019 is one minus it: their CIFAR
            runs have 0.001 here, their ImageNet run 0.1).
        init: The first curvature s. None: the first step is taken at the mean and finds it.
    """

    argument: ClassVar[str] = "curvature"
    short: ClassVar[str] = "decay"

    decay: float | None = None
    init: float | None = None

    def __post_init__(self) -> None:
        if self.decay is not None:
            check_decay("curvature.decay", self.decay)
        if self.init is not None and not (is_number(self.init) and 0 <= self.init < math.inf):
            raise ValueError(f"curvature.init={self.init!r:.80} must be one number, finite and not negative.")


@dataclass(frozen=True)
class Warmup(Group):
    """A temperature that rises linearly at the beginning of the training.

    Attributes:
        start: Temperature at the first step.
        steps: Steps until `to` is reached.
        to: Temperature from then on.
    """

    argument: ClassVar[str] = "temperature"
    short: ClassVar[str] = "to"

    start: float | None = None
    steps: int = 0
    to: float = 1.0

    def __post_init__(self) -> None:
        check_temperature(self.to)
        checked_count("temperature.steps", self.steps, least=0, what="steps")
        if self.start is not None and not (is_number(self.start) and 0 < self.start < math.inf):
            raise ValueError(f"temperature.start={self.start!r:.80} must be one number, positive and finite.")
        if self.start is None or self.steps == 0:
            raise ValueError(
                f"temperature.start={self.start} and temperature.steps={self.steps} belong together: give both (and at "
                "least one step), or one number as the temperature."
            )


def check_decay(name: str, value: Any) -> None:
    """Raise ValueError unless the value of the argument `name` is a number in [0, 1)."""
    if not is_number(value):
        raise ValueError(f"{name}={value!r:.80} must be one number.")
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value} must lie in [0, 1).")


def check_flags(group: Group, *names: str) -> None:
    """Raise ValueError unless the fields `names` of a `group` are True or False."""
    for name in names:
        value = getattr(group, name)
        if not isinstance(value, bool):
            raise ValueError(f"{group.argument}.{name}={value!r:.80} must be True or False.")


def check_temperature(value: Any) -> None:
    """Raise ValueError unless the value is a possible temperature."""
    if not is_number(value):
        raise ValueError(f"temperature={value!r:.80} must be one number.")
    if not 0 < value < math.inf:
        raise ValueError(f"temperature={value} must be positive and finite; 1 is the exact posterior.")


def make_temperature(given: Warmup | Mapping[str, Any] | float | None) -> Warmup | float | None:
    """A temperature, or one that warms up from a mapping of the fields of `Warmup`; None if it is open."""
    if isinstance(given, Mapping | Group):
        return Warmup.of(given)
    if given is not None:
        check_temperature(given)
    return given


# -- names of 0.1 ----------------------------------------------------------------------------------------------------


def _place_start(arguments: dict[str, Any], start: float | None) -> None:
    if start is not None:
        arguments["temperature"] = {"to": arguments.get("temperature", 1.0), "start": start}


def _place_steps(arguments: dict[str, Any], steps: int | None) -> None:
    if steps:
        given = arguments.get("temperature", 1.0)
        arguments["temperature"] = {**(given if isinstance(given, Mapping) else {"to": given}), "steps": steps}


def _place_augmentation(arguments: dict[str, Any], factor: float) -> None:
    if not is_number(factor) or not 0 < factor < math.inf:
        raise ValueError(f"augmentation={factor!r:.80} must be positive and finite.")
    given = arguments.get("temperature", 1.0)
    if factor == 1:
        return
    if isinstance(given, Warmup):
        arguments["temperature"] = Warmup(given.start and given.start / factor, given.steps, given.to / factor)
    elif isinstance(given, Mapping):
        arguments["temperature"] = {k: v / factor if k in ("to", "start") else v for k, v in given.items()}
    else:
        arguments["temperature"] = given / factor


def _drop_paper_tau(arguments: dict[str, Any], value: bool) -> None:
    if value:
        raise ValueError("paper_tau=True was removed: it made the noise of the paper's text, not of its code.")


RENAMED_MOMENTUM = {"averaged": "momentum.averaged", "momentum_correction": "momentum.correction"}
RENAMED_CURVATURE = {"curvature_decay": "curvature.decay", "curvature_init": "curvature.init"}
# In this order: the last divides what the first two make.
RENAMED_TEMPERATURE = {
    "temperature_start": Replaced("temperature=credo.Warmup(start=…, steps=…)", _place_start),
    "warmup_steps": Replaced("temperature=credo.Warmup(start=…, steps=…)", _place_steps),
    "augmentation": Replaced("temperature=temperature/augmentation", _place_augmentation),
}
PAPER_TAU = Replaced("without effect", _drop_paper_tau)
