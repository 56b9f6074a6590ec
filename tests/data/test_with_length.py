"""A given number of batches for loaders that do not know theirs."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import credo
from credo.data import WithLength


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        for i in range(12):
            yield torch.full((2,), float(i)), torch.tensor(i % 2)


def test_an_iterable_data_set_is_trained_on_for_the_given_number_of_batches() -> None:
    loader = DataLoader(Stream(), batch_size=3)
    posterior = credo.MAP(nn.Linear(2, 2), data_size=12)
    with pytest.raises(TypeError, match=r"credo\.data\.WithLength\(loader, batches="):
        credo.fit(posterior, loader, epochs=1)
    credo.fit(posterior, WithLength(loader, batches=4), epochs=2)
    assert posterior.steps == 8


def test_a_loader_that_ends_before_is_an_error() -> None:
    with pytest.raises(credo.CredoError, match=r"ended after 2 of 3 batches: give batches=2"):
        list(WithLength([1, 2], batches=3))
    with pytest.raises(TypeError, match="reads the loader from its start"):
        WithLength(iter([1]), batches=1)
