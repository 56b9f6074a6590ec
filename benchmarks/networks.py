"""The networks that are timed, and random data for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.sequence_networks import LastState, PatchTransformer, PooledTransformer
from credo.models import build_model

CLASSES = 10
DATA_SIZE = 50_000
"""The N of every objective: it scales a term and costs nothing."""


@dataclass(frozen=True)
class Net:
    """A network, the shape of one example, and the batch of a training step.

    Attributes:
        model: Its name in `credo.models`, or a function that makes it from the number of classes.
        shape: The shape of one example.
        batch: Examples of a training step.
        options: Further arguments of either.
    """

    model: str | Callable[..., nn.Module]
    shape: tuple[int, ...]
    batch: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """A new network; the same weights every time."""
        if isinstance(self.model, str):
            return build_model(self.model, inputs=self.shape, classes=CLASSES, seed=0, **self.options)
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return self.model(CLASSES, **self.options)


NETS = {
    "mlp": Net("mlp", (1, 28, 28), 128),
    "mlp1200": Net("mlp", (1, 28, 28), 128, {"hidden": [1200, 1200]}),
    "lenet5": Net("lenet5", (3, 32, 32), 128),
    "alexnet": Net("alexnet", (3, 32, 32), 128),
    "resnet20": Net("resnet20", (3, 32, 32), 128),
    "transformer": Net(PooledTransformer, (64, 16), 32),
    "lstm": Net(LastState, (32, 16), 64),
    "vit": Net(PatchTransformer, (3, 32, 32), 64),
    "resnet18": Net("resnet18", (3, 32, 32), 64),
}


def random_inputs(shape: tuple[int, ...], count: int, *, seed: int = 0) -> Tensor:
    """Inputs of Gaussian noise."""
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def random_batches(shape: tuple[int, ...], batch: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of Gaussian noise with random labels.

    Several, since a network that has learnt its only batch by heart has gradients so small that slow subnormal
    arithmetic would be timed.
    """
    generator = torch.Generator().manual_seed(count)
    labels = [torch.randint(CLASSES, (batch,), generator=generator) for _ in range(count)]
    return [(random_inputs(shape, batch, seed=index), y) for index, y in enumerate(labels)]
