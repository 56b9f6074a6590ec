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

# Factors change fast at first. Of so many steps made, one lies between new ones, and an average of about twenty spans a
# tenth of the training so far; at most so many.
STEPS_BY_INTERVAL, LONGEST_INTERVAL = 200, 10
# Steps between new inverses at least, and new factors to one of them.
INVERSE_EVERY, FACTORS_BY_INVERSE = 10, 2


@dataclass(frozen=True)
class KroneckerCurvature(Group):
    """The curvature of K-FAC and noisy K-FAC: two factors for each layer.

    Attributes:
        decay: Weight of the old factors, after the first ones.
        factor_every: Steps between new factors. None: 1 in the first 400 steps, 2 in the next 200, and so on up to 10.
        inverse_every: Steps between new inverses; the first as many steps make one each. None: 10, or two times those
            between new factors if that is more.
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
    factor_every: int | None = None
    inverse_every: int | None = None
    fisher: str = "empirical"
    eigenbasis: bool = False
    inverse_delay: int = 0
    diagonal: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        check_decay("curvature.decay", self.decay)
        for name in ("factor_every", "inverse_every"):
            if (steps := getattr(self, name)) is not None:
                checked_count(f"curvature.{name}", steps, what="steps")
        checked_count("curvature.inverse_delay", self.inverse_delay, least=0, what="steps")
        if self.inverse_delay > (every := self.inverse_interval(0)):
            raise ValueError(
                f"curvature.inverse_delay={self.inverse_delay} is more than curvature.inverse_every={every}: inverses "
                "would be replaced before they are used."
            )
        check_flags(self, "eigenbasis")
        if self.fisher not in FISHERS:
            raise ValueError(unknown("curvature.fisher", str(self.fisher), FISHERS))
        patterns = [self.diagonal] if isinstance(self.diagonal, str) else self.diagonal
        if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"curvature.diagonal={self.diagonal!r:.80} must be names or globs of parameters.")
        object.__setattr__(self, "diagonal", tuple(patterns))

    def factor_interval(self, step: int) -> int:
        """Steps between new factors, after `step` steps."""
        if self.factor_every is not None:
            return self.factor_every
        return min(LONGEST_INTERVAL, max(1, step // STEPS_BY_INTERVAL))

    def inverse_interval(self, step: int) -> int:
        """Steps between new inverses, after `step` steps."""
        if self.inverse_every is not None:
            return self.inverse_every
        return max(INVERSE_EVERY, FACTORS_BY_INVERSE * self.factor_interval(step))
