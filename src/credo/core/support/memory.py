"""Tune glibc's malloc."""

from __future__ import annotations

from functools import cache

import numpy as np

# glibc learns from blocks of up to 32 MiB.
_LARGEST = 31 * 2**20


@cache
def keep_freed() -> None:
    """Raise glibc's mmap threshold so that freed activation buffers (up to 64 MB) are reused.

    The threshold follows the largest block freed so far. In a new process ResNet-20 predicted 13 to 22 % more slowly
    without this. No effect with other C libraries.
    """
    np.empty(_LARGEST, dtype=np.uint8)
