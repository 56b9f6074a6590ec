"""Warnings that point at the user's line, however deep inside the package they arise."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import torch

# Credo itself, and what stands between its functions and their callers: decorators such as torch.no_grad.
_INSIDE = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent), contextlib.__file__)


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the nearest caller outside of Credo.

    Args:
        message: The text.
        category: The warning's class.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
