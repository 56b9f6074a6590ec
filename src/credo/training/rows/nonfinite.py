"""What an error says if training fails on rows that are NaN or infinite already: which rows of the data these are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from credo.core.errors import NonFiniteError, NonFiniteRowsError
from credo.core.network.inputs import split_batch
from credo.core.network.nonfinite_rows import blamed_rows
from credo.data import Batches, Split


def rows_to_blame(data: Any, of: str = "") -> str | None:
    """A sentence with the rows of the data that are not finite; None if there are none, or the data cannot be read.

    Args:
        data: Batches of any form, or a data set.
        of: What the rows are of, for the sentence.
    """
    if isinstance(data, list | tuple):
        with suppress(TypeError, ValueError):
            return blamed_rows(map(split_batch, data), of)
    pair = _whole(data)
    return None if pair is None else blamed_rows([pair], of)


def named(error: NonFiniteError, loader: Any, batch: Callable[[], Any], step: int) -> NonFiniteError:
    """The error to raise: one that names rows of the loader, or of the batch, where these are to blame.

    Args:
        error: What a step raised.
        loader: The training batches.
        batch: Reads the inputs and targets of the batch of this step.
        step: Its number in the epoch, from 0.
    """
    found = rows_to_blame(loader, " of the training data")
    if found is None:
        with suppress(TypeError, ValueError):
            found = blamed_rows([batch()], f" of batch {step} of this epoch")
    return error if found is None else NonFiniteRowsError(f"{found} Parameters are finite and unchanged.")


def _whole(data: Any) -> tuple[Any, Tensor] | None:
    """All inputs and targets in their order; None where they are not in memory."""
    if isinstance(data, Batches):
        data = data.split
    if isinstance(data, DataLoader):
        data = data.dataset
    if isinstance(data, Split):
        return data.x, data.y
    if type(data) is TensorDataset and len(data.tensors) == 2:
        return data.tensors[0], data.tensors[1]
    return None
