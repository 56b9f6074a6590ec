"""What the processes of the test of exchanged bytes do: `python exchange_worker.py FOLDER`, as worker.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from benchmarks.exchange import METHODS
from benchmarks.methods import posterior_of, step_of
from forks import run
from torch import nn

from credo.core.distributed.setup import distribute


def network() -> nn.Module:
    """Convolutions with and without bias, BatchNorm, a linear layer."""
    torch.manual_seed(0)
    body = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(5 * 4, 3))


def exchanged(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found = {}
    x, y = torch.randn(4, 2, 4, 4), torch.randint(3, (4,))
    for method in METHODS:
        for compress in (None, "bfloat16"):
            posterior = posterior_of(method, network())
            process_group = distribute(posterior, compress=compress)
            step = step_of(posterior)
            for _ in range(2):
                step(x, y)
            found[method, compress] = (process_group.reductions, process_group.bytes_sent)
            process_group.close()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), *sys.argv[2:], jobs=[(exchanged, (2,))])
