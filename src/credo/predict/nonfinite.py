"""Rows without an answer: those whose network outputs are NaN or infinite are refused, or marked as such."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from credo.core.distributed.process_group import ProcessGroup
from credo.core.errors import NonFiniteError, unknown
from credo.predict.result import P

ON_NONFINITE = ("raise", "mark")
_MOST_NAMED = 5


class InputFaults:
    """Numbers of the rows, over all batches, that have no answer because their *inputs* are not finite already."""

    def __init__(self) -> None:
        self._rows: set[int] = set()

    def look(self, x: Tensor, usable: Tensor, first: int) -> None:
        """Take a batch, whose first row has the number `first`, and which rows of it have an answer."""
        for row in (~usable).nonzero().flatten().tolist():
            if x.is_floating_point() and not bool(x[row].isfinite().all()):
                self._rows.add(first + row)

    def of_all(self, process_group: ProcessGroup | None) -> set[int]:
        """Those that any process has found."""
        if process_group is None:
            return self._rows
        found = [process_group.share(sorted(self._rows), source) for source in range(process_group.world)]
        return {row for rows in found for row in rows}


def check_choice(on_nonfinite: str) -> None:
    """Raise ValueError for an unknown choice."""
    if on_nonfinite not in ON_NONFINITE:
        raise ValueError(unknown("on_nonfinite", str(on_nonfinite), ON_NONFINITE))


def refuse_or_mark(prediction: P, on_nonfinite: str, faults: InputFaults, process_group: ProcessGroup | None) -> P:
    """The prediction, if every row of it has an answer; else NonFiniteError, or NaN in all numbers of such rows."""
    usable = prediction.finite
    if bool(usable.all()):
        return prediction
    if on_nonfinite == "mark":
        return _marked(prediction, usable)
    raise NonFiniteError(_message((~usable).nonzero().flatten().tolist(), len(usable), faults.of_all(process_group)))


def _marked(prediction: P, usable: Tensor) -> P:
    numbers = {f.name: getattr(prediction, f.name) for f in fields(prediction) if f.name != "targets"}
    blank = {name: _blank(value, usable) for name, value in numbers.items() if value is not None}
    return replace(prediction, **blank)


def _blank(value: Tensor, usable: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value  # counts of draws
    return torch.where(usable.view(-1, *[1] * (value.dim() - 1)), value, torch.nan)


def _message(rows: list[int], total: int, faulty: set[int]) -> str:
    given, computed = [row for row in rows if row in faulty], [row for row in rows if row not in faulty]
    parts = []
    if given:
        parts.append(f"The inputs of {_listed(given)} are NaN or infinite already: fill the gaps or leave them out.")
    if computed:
        parts.append(
            f"The inputs of {_listed(computed)} are finite, so the network's weights are not, or its activations "
            "overflow: look at their scale, and at how training ended."
        )
    return (
        f"{len(rows)} of {total} rows have no prediction, since the network's outputs for them are NaN or infinite. "
        f"{' '.join(parts)} on_nonfinite='mark' predicts the other rows and says by prediction.finite which they are."
    )


def _listed(rows: list[int]) -> str:
    named = ", ".join(map(str, rows[:_MOST_NAMED]))
    more = f" and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
    return f"row{'s' if len(rows) > 1 else ''} {named}{more}"
