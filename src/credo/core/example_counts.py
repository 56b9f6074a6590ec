"""The number of examples that a loss averages over, and the weight of each row in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.distributed.process_group import ProcessGroup
from credo.core.network.inplace_inputs import first_size

_MEANING = "the number that the mean loss was divided by, in the units of data_size"


@dataclass(frozen=True)
class Counted:
    """n and w of a batch loss Σ wᵢ·ℓᵢ / n over its rows.

    Raises ValueError if `examples` is not a positive number, or if `weights` are not one finite, non-negative number
    for each row, with at least one above zero.

    Args:
        examples: n, in the units of `data_size`. None: the sum of `weights`, or without them the number of rows.
        weights: w, [rows]: row i counts as if it were in the batch wᵢ times; 0 ignores it. None: every row counts once;
            if `examples` differs from the number of rows, rows without a gradient at the network's output are ignored.
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
        """Whether every row counts once."""
        return self.examples is None and self.weights is None

    @property
    def total(self) -> float | None:
        """n, if known without the batch."""
        if self.examples is None and self.weights is not None:
            return float(self.weights.sum())
        return self.examples

    def given(self) -> dict[str, Any]:
        """The values given, as arguments of `step`."""
        options = {"examples": self.examples, "weights": self.weights}
        return {name: value for name, value in options.items() if value is not None}

    def of(self, rows: int) -> float:
        """n for a batch of `rows` rows; raises ValueError if the number of weights differs."""
        self.check_rows(rows)
        total = self.total
        return float(rows) if total is None else total

    def check_rows(self, rows: int) -> None:
        """Raise ValueError if there are weights, but not one for each of `rows` rows."""
        if self.weights is not None and len(self.weights) != rows:
            raise ValueError(
                f"weights has {len(self.weights)} entries, but the network's batch has {rows} rows: give one weight "
                "for each row of the network's input, 0 for rows that do not count."
            )

    def chooses(self, rows: int) -> bool:
        """Whether some of `rows` rows are ignored, identified only by a zero gradient at the network's output."""
        return self.weights is None and self.examples is not None and self.examples != rows


EVERY = Counted()


@contextmanager
def rows_checked(net: nn.Module, counted: Counted) -> Iterator[None]:
    """While open, raise ValueError if a loss runs the network on another number of rows than there are weights.

    Args:
        net: The network that the loss is given.
        counted: The examples that it averages over.
    """
    if counted.weights is None:
        yield
        return

    def check(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Forward pre-hook, of the network (`_`), with positional args and keyword options."""
        rows = first_size(args, options) if torch.is_grad_enabled() else None
        if rows is not None:
            counted.check_rows(rows)

    handle = net.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def weighed(
    nll: Callable[[nn.Module], Tensor], counted: Counted, process_group: ProcessGroup | None
) -> Callable[[nn.Module], Tensor]:
    """The loss with its weights checked, and scaled by this process's fraction of all examples if there are several.

    Either all processes know their number of examples or none does, since it takes a reduction.

    Args:
        nll: Loss of a batch as a function of the network.
        counted: The examples that it averages over.
        process_group: Group of the posterior; None if it is not distributed.
    """
    own, fraction = counted.total, 1.0
    if process_group is not None and process_group.defers and own is not None:
        (mean,) = process_group.average_([], [own])
        fraction = own / mean

    def loss(net: nn.Module) -> Tensor:
        with rows_checked(net, counted):
            value = nll(net)
        return value if fraction == 1.0 else fraction * scalar_loss(value)

    return loss


def not_a_loss(given: object) -> TypeError:
    """The error of a step that was given something else than a function of the network."""
    return TypeError(
        "step needs a function of the network, step(lambda net: F.cross_entropy(net(x), y)), which it calls with "
        f"drawn weights; got a {type(given).__name__}."
    )


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
            f"examples={given!r} must be a positive number: {_MEANING}. Skip batches in which no example counts."
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
        raise ValueError("weights are all zero: skip batches in which no example counts.")
    return weights
