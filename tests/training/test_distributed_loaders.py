"""A DataLoader under a process group: resumed at the same example, and augmented for each part of the data apart."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.training import TrainingStopped
from credo.training.epoch_batches import remaining_batches
from credo.training.state import Progress

DATA = TensorDataset(torch.arange(24.0).unsqueeze(1), torch.zeros(24, dtype=torch.long))


def trained(path: Path | None, *, until: int | None = None) -> list[list[int]]:
    """The examples of each batch that a process group of one trains on."""
    seen: list[list[int]] = []
    posterior = credo.MAP(nn.Linear(1, 2), data_size=24)
    credo.distribute(posterior)

    def nll(net: nn.Module, batch: Any) -> Tensor:
        seen.append([int(value) for value in batch[0][:, 0]])
        return F.cross_entropy(net(batch[0]), batch[1])

    loader = DataLoader(DATA, batch_size=4, shuffle=True)
    list(credo.train(posterior, loader, epochs=2, checkpoint=path, nll=nll, stop=lambda: len(seen) == until))
    return seen


@pytest.mark.parametrize("until", [1, 3, 8])
def test_a_shuffling_loader_goes_on_at_the_same_example(until: int, tmp_path: Path) -> None:
    whole = trained(None)
    for epoch in (whole[:6], whole[6:]):
        assert sorted(itertools.chain(*epoch)) == list(range(24))
    with pytest.raises(TrainingStopped):
        trained(tmp_path / "c.pt", until=until)
    assert trained(tmp_path / "c.pt") == whole[until:]


class Seeding:
    """Keeps what the global generator gives when an iteration begins, from which a DataLoader seeds its workers."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        self.drawn.append(float(torch.rand(())))
        return iter([0])


def test_workers_of_different_parts_are_seeded_apart_and_those_of_one_part_alike() -> None:
    def drawn(rank: int, *, mc_groups: int, epoch: int = 0) -> float:
        loader = Seeding()
        process_group: Any = SimpleNamespace(rank=rank, data_rank=rank // mc_groups)
        with torch.random.fork_rng(devices=[]):
            remaining_batches(loader, process_group, 5, Progress(epoch))
        return loader.drawn[0]

    assert drawn(0, mc_groups=1) != drawn(1, mc_groups=1)
    assert drawn(0, mc_groups=2) == drawn(1, mc_groups=2) != drawn(2, mc_groups=2)
    assert drawn(0, mc_groups=1) != drawn(0, mc_groups=1, epoch=1)
