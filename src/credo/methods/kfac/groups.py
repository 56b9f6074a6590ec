"""The group of arguments of K-FAC's curvature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from credo.core.arguments import Group, Renamed
from credo.core.errors import unknown
from credo.core.support.validate import checked_count
from credo.methods.natural.groups import RENAMED_CURVATURE, RENAMED_MOMENTUM, RENAMED_TEMPERATURE, check_decay

FISHERS = ("empirical", "sampled")
RENAMED: Renamed = {
    "curvature_decay": RENAMED_CURVATURE["curvature_decay"],
    "factor_every": "curvature.factor_every",
    "inverse_every": "curvature.inverse_every",
    "fisher": "curvature.fisher",
    "diagonal": "curvature.diagonal",
    "momentum_correction": RENAMED_MOMENTUM["momentum_correction"],
    **RENAMED_TEMPERATURE,
}

# Steps in which all factors are new, and steps between new ones of costly layers after them.
DENSE_STEPS, RARE = 50, 5


@dataclass(frozen=True)
class KroneckerCurvature(Group):
    """The curvature of K-FAC and noisy K-FAC: two factors for each layer.

    Attributes:
        decay: Weight of the old factors, after the first ones.
        factor_every: Steps between new factors. None: 1 in the first 50 steps, and always for linear layers with at
            most 256 inputs and outputs; 5 for all others, whose factors would cost more than a pass.
        inverse_every: Steps between new inverses; the first as many steps make one each.
        fisher: `"empirical"`, or `"sampled"`: labels drawn from the network's outputs by `likelihood`, which must be
            that of the loss, at the cost of a second pass.
        diagonal: Names or globs of parameters that get a diagonal instead of factors.
    """

    argument: ClassVar[str] = "curvature"
    short: ClassVar[str] = "decay"

    decay: float = 0.95
    factor_every: int | None = 1
    inverse_every: int = 10
    fisher: str = "empirical"
    diagonal: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        check_decay("curvature.decay", self.decay)
        for name in ("factor_every", "inverse_every"):
            if (steps := getattr(self, name)) is not None or name == "inverse_every":
                checked_count(f"curvature.{name}", steps, what="steps")
        if self.fisher not in FISHERS:
            raise ValueError(unknown("curvature.fisher", str(self.fisher), FISHERS))
        patterns = [self.diagonal] if isinstance(self.diagonal, str) else self.diagonal
        if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"curvature.diagonal={self.diagonal!r:.80} must be names or globs of parameters.")
        object.__setattr__(self, "diagonal", tuple(patterns))
