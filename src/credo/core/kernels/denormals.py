"""Denormal floats, which make many CPUs much slower."""

from __future__ import annotations

import torch


def flush_denormals() -> bool:
    """Treat float32 below 1.2e-38 as zero in this thread and its children; return whether the CPU supports it.

    A prior shrinks the weights of dead units towards zero without end: with a quarter of AlexNet's weights denormal, a
    step of Adam took three times as long. This is a setting of the whole process, so only programs use it.
    """
    return torch.set_flush_denormal(True)
