"""What a training step asks of an accelerator: operators that compute, and reads that wait for all of them.

Both can be counted without one: every operator but a view is at least one kernel launch there, and every number that
is read waits for all that was launched. Compiled kernels are off, and checks deferred, as on an accelerator.
"""

from __future__ import annotations

import argparse
import collections
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import credo
from benchmarks.report import Run, as_result, table

METHODS = ("MAP", "BBB", "IVON", "VOGN", "OGN", "NodeBNN", "NoisyKFAC")
# Steps before the one that is counted. By then K-FAC makes new inverses in every tenth step only, as in step 20.
STEADY, INVERTING = 12, 20
_COLUMNS = ("operators", "of Adam's", "reads that wait")
_VIEWS = {
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "slice", "split", "split_with_sizes",
    "select", "detach", "alias", "as_strided", "unsqueeze", "squeeze", "unfold", "unbind", "empty", "empty_like",
    "empty_strided", "new_empty", "lift_fresh", "_local_scalar_dense", "numpy_T", "chunk", "narrow", "diagonal",
}  # fmt: skip
_WAITING = ("_local_scalar_dense", "is_nonzero", "aten.nonzero", "aten.equal")


class Count(TorchDispatchMode):
    """While open, counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one and run it."""
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))

    @property
    def computing(self) -> int:
        """Operators that are no views."""
        return sum(n for name, n in self.seen.items() if name.split(".")[1] not in _VIEWS)

    @property
    def waiting(self) -> int:
        """Operators that wait until a number can be read."""
        return sum(n for name, n in self.seen.items() if any(one in name for one in _WAITING))


def lenet() -> nn.Module:
    """LeNet-5 for 32×32 colour images."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def counted(train: Callable[[], object], after: int = STEADY) -> Count:
    """The operators of a step.

    Args:
        train: Makes one step.
        after: How many are made before.
    """
    for _ in range(after):
        train()
    with Count() as count:
        train()
    return count


def step_of(method: str, **options: Any) -> Callable[[], object]:
    """A step of a method, or of fused Adam, on LeNet-5 and a batch of 32.

    Args:
        method: A class of Credo, or `"Adam"`.
        options: Its arguments.
    """
    x, y = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    net = lenet()
    if method == "Adam":
        adam = torch.optim.Adam(net.parameters(), fused=True)

        def plain() -> None:
            adam.zero_grad()
            F.cross_entropy(net(x), y).backward()
            adam.step()

        return plain
    posterior = getattr(credo, method)(net, data_size=50_000, **options)
    return lambda: posterior.step(lambda net: F.cross_entropy(net(x), y))


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write numbers and versions to a file")
    options = parser.parse_args(arguments)
    run = Run("launches", {}, None)
    os.environ.update(CREDO_KERNELS="0", CREDO_CHECKS="deferred")
    found = {name: counted(step_of(name)) for name in ("Adam", *METHODS)}
    found["NoisyKFAC, no new factors"] = counted(step_of("NoisyKFAC", curvature={"factor_every": 5}))
    found["NoisyKFAC, new inverses"] = counted(step_of("NoisyKFAC"), INVERTING)
    found["NoisyKFAC, EKFAC"] = counted(step_of("NoisyKFAC", curvature={"eigenbasis": True}))
    base = found["Adam"].computing
    rows = {
        name: [f"{count.computing}", f"{count.computing / base:.2f}", f"{count.waiting}"]
        for name, count in found.items()
    }
    print(table("A step of LeNet-5", _COLUMNS, rows))
    numbers = {name: {"computing": count.computing, "waiting": count.waiting} for name, count in found.items()}
    run.finish(numbers, options.json, tables={"operators": as_result(_COLUMNS, rows)})


if __name__ == "__main__":
    main()
