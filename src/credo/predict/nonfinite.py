"""Rows whose network outputs are NaN or infinite: an error that lists them, or marks in the prediction."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace

import torch
from torch import Tensor

from credo.core.errors import NonFiniteError
from credo.core.network.inputs import AnyInputs, tensors_of
from credo.core.network.nonfinite_rows import listed
from credo.predict.result import P


def nonfinite_inputs(x: AnyInputs, finite: Tensor, first: int) -> set[int]:
    """Numbers of the rows without a prediction whose *inputs* are NaN or infinite already.

    Args:
        x: Inputs of a batch.
        finite: Which of its rows have a prediction, [rows].
        first: Number of its first row, counted over all batches.
    """
    bad = (~finite).nonzero().flatten().tolist()
    floating = [tensor for tensor in tensors_of(x) if tensor.is_floating_point() and len(tensor) == len(finite)]
    return {first + row for row in bad if not all(bool(tensor[row].isfinite().all()) for tensor in floating)}


def raise_or_mark(prediction: P, on_nonfinite: str, bad_inputs: Collection[int]) -> P:
    """Raise NonFiniteError, or set all numbers of the rows without a prediction to NaN.

    Args:
        prediction: Of all rows, some of which are not finite.
        on_nonfinite: `"raise"` or `"mark"`.
        bad_inputs: The rows whose inputs are to blame.
    """
    finite = prediction.finite
    if on_nonfinite == "raise":
        raise NonFiniteError(_message((~finite).nonzero().flatten().tolist(), len(finite), bad_inputs))
    numbers = {f.name: getattr(prediction, f.name) for f in fields(prediction) if f.name != "targets"}
    marked = {name: _marked(value, finite) for name, value in numbers.items() if isinstance(value, Tensor)}
    return replace(prediction, **marked)


def _marked(value: Tensor, finite: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value  # counts of draws
    return torch.where(finite.view(-1, *[1] * (value.dim() - 1)), value, torch.nan)


def _message(rows: list[int], total: int, bad_inputs: Collection[int]) -> str:
    given, computed = [row for row in rows if row in bad_inputs], [row for row in rows if row not in bad_inputs]
    parts = []
    if given:
        parts.append(f"The inputs of {listed(given)} are NaN or infinite already: fill the gaps or leave them out.")
    if computed:
        parts.append(
            f"The inputs of {listed(computed)} are finite, so the network's weights are not, or its activations "
            "overflow: look at their scale, and at how training ended."
        )
    return (
        f"{len(rows)} of {total} rows have no prediction, since the network's outputs for them are NaN or infinite. "
        f"{' '.join(parts)} on_nonfinite='mark' predicts the other rows; prediction.finite tells which they are."
    )
