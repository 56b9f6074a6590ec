"""Examples to measure on: counted, chosen at random, and the loader left as it was."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from credo.data import Batches, Split
from credo.doctor.subset import take_subset


def numbered(n: int) -> Split:
    """Example i has the input i."""
    return Split(torch.arange(n).float().unsqueeze(1), torch.arange(n))


@pytest.mark.parametrize("most", [1, 30, 100, 1000])
def test_counts_and_rows_that_belong_together(most: int) -> None:
    sample = take_subset(Batches(numbered(100), batch_size=32), most=most)
    assert (sample.examples, sample.batches, sample.batch_size) == (100, 4, 32)
    assert len(sample) == min(most, 100)
    assert torch.equal(sample.x[:, 0].long(), sample.y)
    assert len(set(sample.y.tolist())) == len(sample)


def test_every_example_has_the_same_chance() -> None:
    """10 of 100, in 400 samples: each example 40 ± 6 times; beyond 5.5 σ once in 250,000 runs of 100 counts."""
    counts = torch.zeros(100)
    for seed in range(400):
        counts[take_subset(Batches(numbered(100), batch_size=7, shuffle=False), most=10, seed=seed).y] += 1
    assert counts.sum() == 4000
    assert float((counts - 40).abs().max()) < 5.5 * 6


def test_a_sorted_loader_is_mixed() -> None:
    split = Split(torch.zeros(100, 1), torch.arange(100) // 50)
    batch = take_subset(Batches(split, batch_size=20, shuffle=False), most=1000).split()[0][1]
    assert set(batch.tolist()) == {0, 1}


def test_the_same_seed_gives_the_same_examples() -> None:
    first, second, other = (
        take_subset(Batches(numbered(50), batch_size=8), most=10, seed=s).y.tolist() for s in (1, 1, 2)
    )
    assert first == second
    assert first != other


def test_a_known_size_stops_early() -> None:
    seen = []

    def batches() -> Any:
        for i in range(100):
            seen.append(i)
            yield torch.zeros(10, 1), torch.full((10,), i)

    sample = take_subset(batches(), most=25, data_size=5000)
    assert (sample.examples, sample.batches, sample.batch_size, len(sample)) == (5000, 500, 10, 25)
    assert len(seen) == 3


def test_a_dropped_batch_is_not_seen() -> None:
    assert take_subset(Batches(numbered(100), batch_size=32, drop_last=True), most=10).examples == 96


def test_batches_go_on_where_they_were() -> None:
    loader = Batches(numbered(20), batch_size=5)
    loader.set_epoch(3)
    take_subset(loader, most=4)
    assert loader.epoch == 3


def test_a_data_loader_goes_on_where_it_was() -> None:
    def make() -> DataLoader[Any]:
        split = numbered(20)
        return DataLoader(
            TensorDataset(split.x, split.y), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(1)
        )

    wanted = [batch[1].tolist() for batch in make()]
    loader = make()
    take_subset(loader, most=4)
    assert [batch[1].tolist() for batch in loader] == wanted


def test_what_is_no_training_data() -> None:
    with pytest.raises(ValueError, match="needs targets"):
        take_subset([torch.zeros(3, 2)], most=5)
    with pytest.raises(ValueError, match="The loader is empty"):
        take_subset([], most=5)
    with pytest.raises(ValueError, match="examples=0"):
        take_subset([], most=0)
    with pytest.raises(ValueError, match="data_size=0"):
        take_subset([], most=5, data_size=0)
