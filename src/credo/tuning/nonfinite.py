"""Rows that are NaN or infinite: `auto` names them before it trains, or when its first training meets them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from credo.core.errors import NonFiniteRowsError
from credo.core.network.nonfinite_rows import blamed_rows
from credo.training.rows.nonfinite import rows_to_blame
from credo.tuning.rows import Pairs
from credo.tuning.starts import outputs_of


def check_finite(pairs: Pairs, network: nn.Module, train: Any, validation: Any) -> None:
    """Raise NonFiniteRowsError for targets that are NaN or infinite, and inputs without a finite output for that.

    Args:
        pairs: The rows that are looked at.
        network: A network of its own.
        train: Where they come from, to name them, as in `auto`.
        validation: The same.
    """
    blamed = blamed_rows(pairs, " of those that were read first")
    if blamed is None:
        return
    is_right = all(bool(y.isfinite().all()) for _, y in pairs)
    if not (is_right and all(bool(out.isfinite().all()) for out in outputs_of(network, pairs))):
        raise NonFiniteRowsError(_in_data(train, validation) or blamed)


@contextmanager
def rows_named(train: Any, validation: Any) -> Iterator[None]:
    """Name rows that are not finite by their numbers in the data that `auto` was given, not in a part of it.

    Args:
        train: As in `auto`.
        validation: As in `auto`.
    """
    try:
        yield
    except NonFiniteRowsError as error:
        raise NonFiniteRowsError(_in_data(train, validation) or str(error)) from None


def _in_data(train: Any, validation: Any) -> str | None:
    return rows_to_blame(train, " of the training data") or rows_to_blame(validation, " of the validation data")
