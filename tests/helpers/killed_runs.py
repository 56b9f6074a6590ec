"""Small trainings that can be killed after any step, and the comparison of what became of them."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import credo
from credo.data import Batches
from credo.data.splits import Split

SIZE = 22
IMAGES = torch.randint(256, (SIZE, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(3, (SIZE,), generator=torch.Generator().manual_seed(2))
FLOATS = TensorDataset(IMAGES.float() / 255, LABELS)


class Killed(Exception):  # noqa: N818 - nothing is wrong
    pass


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(6, 3)
    )


METHODS: dict[str, Callable[[], credo.Posterior]] = {
    "map": lambda: credo.MAP(network(), data_size=SIZE, prior=1.0, lr=0.05),
    "bbb": lambda: credo.BBB(network(), data_size=SIZE, lr=0.05, draws=2, temperature=1.0),
    "ensemble": lambda: credo.Ensemble(
        [credo.BBB(network(s), data_size=SIZE, lr=0.05, seed=s, noise="flipout") for s in range(2)]
    ),
}
LOADERS: dict[str, Callable[[], Any]] = {
    "batches": lambda: Batches(Split(IMAGES, LABELS), batch_size=6, augment="flip-crop"),
    "loader with a sampler's generator": lambda: DataLoader(
        FLOATS, batch_size=6, sampler=RandomSampler(FLOATS, generator=torch.Generator().manual_seed(9))
    ),
}


def recorded(
    posterior: credo.Posterior, loader: Any, *, kill_at: tuple[int, int] | None = None, **options: Any
) -> tuple[list[Any], list[tuple[int, int]]]:
    """Records without wall times, and the steps that were made; killed after that step of that epoch."""
    steps: list[tuple[int, int]] = []

    def on_step(epoch: int, done: int, total: int, terms: credo.Terms) -> None:
        steps.append((epoch, done))
        if (epoch, done) == kill_at:
            raise Killed

    records = []
    options = {"schedule": "cosine", "seed": 5, **options}
    for record in credo.train(posterior, loader, on_step=on_step, **options):
        records.append({**asdict(record), "seconds": 0.0})
    return records, steps


def assert_equal(a: Any, b: Any, path: str = "") -> None:
    """Bit for bit, in whatever they hold."""
    if isinstance(a, Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_equal(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for index, (one, two) in enumerate(zip(a, b, strict=True)):
            assert_equal(one, two, f"{path}/{index}")
    else:
        assert a == b, path
