"""What training and prediction read batches from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset


def check_batches(given: Any, *, also: str = "") -> None:
    """Refuse what holds examples and not batches, or nothing to read, and say how to make batches of it.

    `also` names what else would do.
    """
    if isinstance(given, Dataset) and not isinstance(given, IterableDataset):
        advice = "torch.utils.data.DataLoader(data, batch_size=128) makes batches of it"
    elif isinstance(given, str | Mapping | np.ndarray) or not (
        isinstance(given, Iterable) or hasattr(given, "__getitem__")
    ):
        made = "credo.data.Batches(data.train, batch_size=128) of a Split"
        advice = f"give {also}a DataLoader, a list of batches, or {made}"
    else:
        return
    raise TypeError(f"Batches are needed, got a {type(given).__name__}: {advice}.")
