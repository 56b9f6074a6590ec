"""Observation noise of the regressor, one standard deviation for each output."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from credo.core.errors import unknown
from credo.core.likelihood import GaussianNoise
from credo.core.support.validate import is_number

NOISES = ("learned", "heteroscedastic")
# Initial value of learned noise, as a fraction of the targets' standard deviation.
_START = 0.5


def make_noise(choice: str | float, spread: NDArray[Any], unit: NDArray[Any]) -> GaussianNoise:
    """The likelihood for a choice of `noise=`.

    Args:
        choice: `"learned"`, `"heteroscedastic"`, or a standard deviation in the units of the targets.
        spread: Standard deviation of each scaled output.
        unit: One unit of the scaled outputs in the units of the targets.
    """
    if isinstance(choice, str):
        if choice not in NOISES:
            raise ValueError(unknown("noise", choice, NOISES) + " Or give a number: its standard deviation.")
        if choice == "heteroscedastic":
            return GaussianNoise(heteroscedastic=True)
        stds: NDArray[Any] = _START * np.where(spread > 0, spread, 1.0)
    else:
        if not (is_number(choice) and 0 < choice < float("inf")):
            raise ValueError(f"noise={choice} must be positive: a standard deviation in the units of the targets.")
        stds = choice / unit
    learn = isinstance(choice, str)
    return GaussianNoise(stds.tolist() if len(stds) > 1 else float(stds[0]), learn=learn)
