"""Numbers too small for a normal float, with which CPUs compute many times slower."""

from __future__ import annotations

import torch


def flush_denormals() -> bool:
    """Take float32 below 1.2e-38 for zero, in this thread and those that it starts; whether the CPU can do so.

    A prior pulls the weights of a dead unit towards zero without end. Once a quarter of AlexNet's were that small, a
    step of Adam took three times as long. A setting of the whole process, so it is for programs, not for the library.
    """
    return torch.set_flush_denormal(True)
