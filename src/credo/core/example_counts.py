"""Over how many examples a loss is the mean, and how often each row of the batch counts in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.distributed.process_group import ProcessGroup

_MEANING = "the number that the mean loss was divided by, in the units of data_size"


@dataclass(frozen=True)
class Counted:
    """A batch's loss is Σ wᵢ·ℓᵢ / n over its rows; this says what n and w are.

    Raises ValueError if `examples` is not a positive number, or if `weights` are not one finite, non-negative number
    for each row, with at least one above zero.

    Args:
        examples: n, in the units of `data_size`. None: the sum of `weights`, or without them the number of rows.
        weights: w, [rows]: row i counts as if it were in the batch wᵢ times, not at all with 0. None: every row counts
            once; if `examples` is another number, rows without a gradient at the network's output do not count.
    """

    examples: float | None = None
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        if self.examples is not None:
            object.__setattr__(self, "examples", _checked_examples(self.examples))
        if self.weights is not None:
            object.__setattr__(self, "weights", _checked_weights(self.weights))

    @property
    def is_plain(self) -> bool:
        """Whether nothing was said: every row counts once."""
        return self.examples is None and self.weights is None

    @property
    def total(self) -> float | None:
        """n as far as it is known without the batch."""
        if self.examples is None and self.weights is not None:
            return float(self.weights.sum())
        return self.examples

    def given(self) -> dict[str, Any]:
        """What was said, as arguments of `step`."""
        said = {"examples": self.examples, "weights": self.weights}
        return {name: value for name, value in said.items() if value is not None}

    def of(self, rows: int) -> float:
        """n for a batch of so many rows; raises ValueError if there is another number of weights."""
        self.check_rows(rows)
        total = self.total
        return float(rows) if total is None else total

    def check_rows(self, rows: int) -> None:
        """Raises ValueError if there are weights, but not one for each of so many rows."""
        if self.weights is not None and len(self.weights) != rows:
            raise ValueError(
                f"weights has {len(self.weights)} entries, but the network's batch has {rows} rows: give one weight "
                "for each row of the network's input, 0 for rows that do not count."
            )

    def chooses(self, rows: int) -> bool:
        """Whether some of so many rows do not count, and only the gradient at the network's output tells which."""
        return self.weights is None and self.examples is not None and self.examples != rows


EVERY = Counted()


def weighed(
    nll: Callable[[nn.Module], Tensor], counted: Counted, process_group: ProcessGroup | None
) -> Callable[[nn.Module], Tensor]:
    """The loss, times this process' share of all examples where several processes average their gradients.

    All of them must say how many examples they have, or none: it takes an exchange.
    """
    own = counted.total
    if process_group is None or not process_group.defers or own is None:
        return nll
    (mean,) = process_group.average_([], [own])
    share = own / mean
    return lambda net: share * scalar_loss(nll(net))


def scalar_loss(value: object) -> Tensor:
    """What a user's `nll` returned, as a scalar tensor; raises ValueError if gradients cannot flow from it."""
    wanted = "nll(net) must return the batch's mean negative log-likelihood, one number computed with `net`"
    if not isinstance(value, Tensor):
        raise ValueError(f"{wanted}; got a {type(value).__name__}.")
    if value.numel() != 1:
        raise ValueError(f"{wanted}; got a tensor of shape {list(value.shape)}: take its mean.")
    if not value.requires_grad:
        raise ValueError(f"{wanted}; got a tensor that depends on no parameter.")
    return value.reshape(())


def _checked_examples(given: Any) -> float:
    try:
        number = math.nan if isinstance(given, bool | str) else float(given)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError(
            f"examples={given!r} must be a positive number: {_MEANING}. A batch in which nothing counts has no loss: "
            "skip it."
        )
    return number


def _checked_weights(given: Any) -> Tensor:
    if not isinstance(given, Tensor) or given.dim() != 1 or given.is_complex():
        kind = f"a tensor of shape {list(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise ValueError(f"weights is {kind}: give a tensor of one number for each row of the batch, shape [rows].")
    weights = given.detach().to("cpu", torch.float64)
    low, high = (float(edge) for edge in torch.aminmax(weights)) if len(weights) else (0.0, 0.0)
    if not (math.isfinite(low) and math.isfinite(high) and low >= 0):
        wrong = "NaN" if math.isnan(low) or math.isnan(high) else f"{low if low < 0 else high:g}"
        raise ValueError(
            f"weights holds {wrong}: weights are how often each row counts, finite and not negative, 0 for rows that "
            "do not."
        )
    if not high > 0:
        raise ValueError("weights are all zero: a batch in which nothing counts has no loss. Skip it.")
    return weights
