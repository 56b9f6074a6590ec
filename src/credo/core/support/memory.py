"""Memory: glibc's malloc, and how much there is."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import torch

# glibc learns from blocks of up to 32 MiB.
_LARGEST = 31 * 2**20


@cache
def keep_freed() -> None:
    """Raise glibc's mmap threshold so that freed activation buffers (up to 64 MB) are reused.

    The threshold follows the largest block freed so far. In a new process ResNet-20 predicted 13 to 22 % more slowly
    without this. No effect with other C libraries.
    """
    np.empty(_LARGEST, dtype=np.uint8)


def available_bytes(device: torch.device) -> float:
    """Return the memory that new tensors can take on a device, in bytes; infinite if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return 1024.0 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):  # not on Linux
        return math.inf
