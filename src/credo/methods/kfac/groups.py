"""The group of arguments of K-FAC's curvature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from credo.core.arguments import Group, Renamed
from credo.core.errors import unknown
from credo.core.support.validate import checked_count
from credo.methods.natural.groups import (
    RENAMED_CURVATURE,
    RENAMED_MOMENTUM,
    RENAMED_TEMPERATURE,
    check_decay,
    check_flags,
)

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
        eigenbasis: EKFAC (George et al. 2018): the factors give eigenvectors only, and along these the variances of
            single examples' gradients, new wherever factors are new, take the place of the eigenvalues' products.
        inverse_delay: Steps after which inverses are used; a thread makes them meanwhile. 0: in the step itself.
        diagonal: Names or globs of parameters that get a diagonal instead of factors.
    """

    argument: ClassVar[str] = "curvature"
    short: ClassVar[str] = "decay"

    decay: float = 0.95
    factor_every: int | None = 1
    inverse_every: int = 10
    fisher: str = "empirical"
    eigenbasis: bool = False
    inverse_delay: int = 0
    diagonal: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        check_decay("curvature.decay", self.decay)
        for name in ("factor_every", "inverse_every"):
            if (steps := getattr(self, name)) is not None or name == "inverse_every":
                checked_count(f"curvature.{name}", steps, what="steps")
        checked_count("curvature.inverse_delay", self.inverse_delay, least=0, what="steps")
        if self.inverse_delay > self.inverse_every:
            raise ValueError(
                f"curvature.inverse_delay={self.inverse_delay} is more than curvature.inverse_every="
                f"{self.inverse_every}: inverses would be replaced before they are used."
            )
        check_flags(self, "eigenbasis")
        if self.fisher not in FISHERS:
            raise ValueError(unknown("curvature.fisher", str(self.fisher), FISHERS))
        patterns = [self.diagonal] if isinstance(self.diagonal, str) else self.diagonal
        if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"curvature.diagonal={self.diagonal!r:.80} must be names or globs of parameters.")
        object.__setattr__(self, "diagonal", tuple(patterns))
