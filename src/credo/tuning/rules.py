"""The rules of `auto`, functions of losses by row: when a candidate is dropped, and what beats the plain network."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from credo.evaluate.intervals import Interval, bootstrap
from credo.tuning.portfolio import PLAIN

# Two-sided level of the interval that must lie wholly above zero for a candidate to be worse beyond chance.
DROP_LEVEL = 0.9
# The same for what must lie wholly below zero to beat the plain network, and the least that a gain must be, in nats:
# less is not worth what predictions cost.
CHOICE_LEVEL, LEAST_GAIN = 0.8, 1e-3
FOLDS = 5


def difference(losses: Tensor, other: Tensor, level: float = DROP_LEVEL) -> Interval:
    """Mean of losses − other over the same rows, with its bootstrap interval.

    Args:
        losses: NLL of each row, [rows].
        other: The same of what it is compared with.
        level: Of the interval.
    """
    if len(losses) != len(other):
        raise ValueError(
            f"Candidates were measured on {len(losses)} and {len(other)} rows: give fewer validation rows."
        )
    return bootstrap(losses - other, level=level)


def is_worse(losses: Tensor, leader: Tensor) -> bool:
    """Whether a candidate is worse than the leader beyond chance.

    Args:
        losses: Its NLL of each row.
        leader: That of the leader.
    """
    return difference(losses, leader).low > 0


def beats(losses: Tensor, plain: Tensor, level: float | None = CHOICE_LEVEL) -> bool:
    """Whether losses are lower than those of the plain network beyond noise, and by enough to matter.

    Args:
        losses: NLL of each row.
        plain: That of the plain network with calibration.
        level: Of the interval that must lie wholly below zero; None: the mean decides.
    """
    if level is None:
        return float((losses - plain).mean()) <= -LEAST_GAIN
    found = difference(losses, plain, level)
    return found.high < 0 and found.value <= -LEAST_GAIN


def choose(
    losses: Mapping[str, Tensor],
    plain: str = PLAIN,
    seed: int = 0,
    *,
    needs_proof: bool = True,
) -> str:
    """The candidate with the lowest mean, if taking the lowest beats the plain network; else the plain network.

    The lowest of many is lower than it should be. What is compared with the plain network is therefore the loss of the
    rule itself: of each row, that of the candidate with the lowest mean on the rows of all other folds.

    Args:
        losses: NLL of each row, by candidate.
        plain: Which of them is the plain network.
        seed: Seed of the folds.
        needs_proof: Whether the gain must be beyond noise; otherwise its mean must be large enough.
    """
    best, level = lowest(losses), CHOICE_LEVEL if needs_proof else None
    return best if best == plain or beats(cross_fitted(losses, lowest, seed), losses[plain], level) else plain


def lowest(losses: Mapping[str, Tensor]) -> str:
    """The candidate with the lowest mean.

    Args:
        losses: NLL of each row, by candidate.
    """
    return min(losses, key=lambda name: float(losses[name].mean()))


def cross_fitted(losses: Mapping[str, Tensor], rule: Callable[[Mapping[str, Tensor]], str], seed: int) -> Tensor:
    """NLL of each row under the candidate that a rule chooses by the rows of all other folds, [rows].

    Args:
        losses: NLL of each row, by candidate.
        rule: Chooses a name by losses.
        seed: Seed of the folds.
    """
    rows = len(next(iter(losses.values())))
    fold = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)) % min(FOLDS, rows)
    found = torch.empty(rows, dtype=torch.double)
    for index in fold.unique().tolist():
        others = fold != index
        chosen = rule({name: each[others] for name, each in losses.items()})
        found[~others] = losses[chosen][~others]
    return found
