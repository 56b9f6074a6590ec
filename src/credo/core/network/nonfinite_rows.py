"""Rows whose inputs or targets are NaN or infinite already: the errors that name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from credo.core.network.inputs import AnyInputs, tensors_of

_MOST_LISTED = 5


def blamed_rows(pairs: Iterable[tuple[AnyInputs | None, Tensor | None]], of: str = "") -> str | None:
    """A sentence that names the rows whose inputs or targets are not finite; None if all are.

    Args:
        pairs: Batches of inputs and targets, whose rows are counted from 0 over all.
        of: What the rows are of, for the sentence, such as " of batch 3".
    """
    bad: dict[str, list[int]] = {"inputs": [], "targets": []}
    first = 0
    for x, y in pairs:
        targets = [] if y is None else [y]
        tensors = [] if x is None else tensors_of(x)
        count = len(y) if y is not None else len(tensors[0]) if tensors else 0
        for what, each in (("inputs", tensors), ("targets", targets)):
            bad[what] += [first + row for row in _bad(each, count)]
        first += count
    parts = [f"the {what} of {listed(rows)}{of}" for what, rows in bad.items() if rows]
    if not parts:
        return None
    text = " and ".join(parts)
    return f"{text[0].upper()}{text[1:]} are NaN or infinite: fill the gaps or leave these rows out."


def listed(rows: Sequence[int]) -> str:
    """Row numbers in words, the first few of many.

    Args:
        rows: The numbers.
    """
    shown = ", ".join(map(str, rows[:_MOST_LISTED]))
    more = f" and {len(rows) - _MOST_LISTED} more" if len(rows) > _MOST_LISTED else ""
    return f"row{'s' if len(rows) > 1 else ''} {shown}{more}"


def _bad(tensors: Iterable[Tensor], count: int) -> list[int]:
    found = torch.zeros(count, dtype=torch.bool)
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dim() and len(tensor) == count:
            found |= ~tensor.detach().isfinite().reshape(count, -1).all(1).cpu()
    return found.nonzero().flatten().tolist()
