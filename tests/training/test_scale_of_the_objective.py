"""The number of examples and of batches that a posterior was told of, against the loader it is trained with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import credo
from credo.data import Batches, Split
from credo.training.loader_checks import known_size

N = 100
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
Y = torch.randint(2, (N,), generator=torch.Generator().manual_seed(1))
SET = TensorDataset(X, Y)
LABELS = Y.where(torch.arange(N) % 10 == 0, -100)  # ten of a hundred rows have one


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(SET)

    def __len__(self) -> int:
        return N


LOADERS: dict[str, Callable[[], Any]] = {
    "batches": lambda: Batches(Split(X, Y), batch_size=10),
    "loader": lambda: DataLoader(SET, batch_size=10, shuffle=True),
}


def bbb(data_size: int, **options: Any) -> credo.BBB:
    return credo.BBB(nn.Linear(3, 2), data_size=data_size, temperature=1.0, **options)


def fit(posterior: credo.Posterior, loader: Any) -> credo.Posterior:
    return credo.fit(posterior, loader, epochs=1, progress=False)


@pytest.mark.parametrize("kind", LOADERS)
def test_the_kl_of_an_epoch_counts_once_or_training_does_not_begin(kind: str) -> None:
    loader, weights = LOADERS[kind](), list[float]()

    def note(epoch: int, done: int, total: int, terms: credo.Terms) -> None:
        weights.append(terms.penalty / terms.kl * N)

    wrong = bbb(N, kl_term={"weight": "blundell", "batches": 100})
    with pytest.raises(ValueError, match=r"expects batches=100.*the loader has 10.*Give kl_term.batches=10"):
        fit(wrong, loader)
    assert wrong.steps == 0
    right = bbb(N, kl_term={"weight": "blundell", "batches": 10})
    credo.fit(right, loader, epochs=1, progress=False, on_step=note)
    assert sum(weights) / len(weights) == pytest.approx(1.0)


def test_members_of_an_ensemble_are_asked_too() -> None:
    members = [bbb(N, kl_term={"weight": "blundell", "batches": b}, seed=b) for b in (10, 11)]
    with pytest.raises(ValueError, match="expects batches=11"):
        fit(credo.Ensemble(members), LOADERS["batches"]())


@pytest.mark.parametrize("options", [{"kl_term": {"weight": "uniform", "batches": 7}}, {"kl_term": {"batches": 7}}])
def test_a_number_of_batches_without_effect_may_be_anything(options: dict[str, Any]) -> None:
    assert fit(bbb(N, **options), LOADERS["batches"]()).steps == 10


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("size", [1, 10, 49, 201, 60_000])
def test_a_number_of_examples_far_from_the_loaders_is_said(kind: str, size: int) -> None:
    with pytest.warns(
        credo.DataSizeWarning, match=rf"data_size={size}, but the loader has 100 examples.*data_size=100.*temperature"
    ):
        fit(bbb(size), LOADERS[kind]())


@pytest.mark.parametrize("size", [50, 90, 100, 200])
def test_held_out_examples_and_repeats_are_no_reason(size: int) -> None:
    assert fit(bbb(size), LOADERS["batches"]()).steps == 10  # warnings are errors


def test_where_there_is_no_prior_the_number_does_not_matter() -> None:
    fit(credo.MAP(nn.Linear(3, 2), data_size=1), LOADERS["batches"]())
    with pytest.warns(credo.DataSizeWarning, match="data_size=1,"):
        fit(credo.MAP(nn.Linear(3, 2), data_size=1, prior=1.0), LOADERS["batches"]())


SIZES: dict[str, tuple[Callable[[], Any], tuple[int, int] | None]] = {
    "batches, drop last": (lambda: Batches(Split(X, Y), batch_size=64, drop_last=True), (100, 100)),
    "batches of one of four processes": (lambda: Batches(Split(X, Y), batch_size=5, rank=1, world=4), (100, 100)),
    "loader, drop last": (lambda: DataLoader(SET, batch_size=64, drop_last=True), (100, 100)),
    "subset": (lambda: DataLoader(Subset(SET, range(20)), batch_size=5), (20, 20)),
    "subset by sampler": (lambda: DataLoader(SET, batch_size=5, sampler=SubsetRandomSampler(range(20))), (20, 100)),
    "weighted, with repeats": (
        lambda: DataLoader(SET, batch_size=5, sampler=WeightedRandomSampler([1.0] * N, 500)),
        (100, 500),
    ),
    "shard by sampler": (
        lambda: DataLoader(SET, batch_size=5, sampler=DistributedSampler(SET, num_replicas=4, rank=0)),
        (25, 100),
    ),
    "own batch sampler": (
        lambda: DataLoader(SET, batch_sampler=BatchSampler(SequentialSampler(SET), 5, drop_last=False)),
        (20, 100),
    ),
    "set of batches": (lambda: DataLoader(SET, batch_size=None), None),
    "stream": (lambda: DataLoader(Stream(), batch_size=10), None),
    "list": (lambda: [(X, Y)], (100, 100)),
    "list of one batch": (lambda: [(X, Y)] * 5, (100, 500)),
    "batches, some labels": (lambda: Batches(Split(X, LABELS), batch_size=50), (10, 10)),
    "loader, some labels": (lambda: DataLoader(TensorDataset(X, LABELS), batch_size=10), (10, 10)),
    "subset, some labels": (
        lambda: DataLoader(Subset(Subset(TensorDataset(X, LABELS), range(50)), [0, 1, 2, 10, 11]), batch_size=5),
        (2, 2),
    ),
    "labelled by sampler": (
        lambda: DataLoader(TensorDataset(X, LABELS), batch_size=5, sampler=SubsetRandomSampler(range(0, 100, 10))),
        (10, 10),
    ),
    "list, some labels": (lambda: list(zip(X.split(10), LABELS.split(10), strict=True)), (10, 10)),
    "some pixels": (lambda: Batches(Split(X, LABELS[:, None, None].expand(N, 4, 4)), batch_size=10), (10, 10)),
    "list of what cannot be counted": (lambda: [object()], None),
}


@pytest.mark.parametrize("kind", SIZES)
def test_what_is_known_of_a_loader(kind: str) -> None:
    make, expected = SIZES[kind]
    assert known_size(make()) == expected


@pytest.mark.parametrize("kind", ["batches, some labels", "loader, some labels", "list, some labels"])
def test_rows_without_a_label_are_no_examples(kind: str) -> None:
    with pytest.warns(credo.DataSizeWarning, match="data_size=100, but the loader has 10 examples.*Give data_size=10"):
        fit(bbb(N), SIZES[kind][0]())
    fit(bbb(10), SIZES[kind][0]())  # warnings are errors


def test_rows_that_are_not_known_before_are_counted_in_the_first_epoch() -> None:
    with pytest.warns(credo.DataSizeWarning, match="data_size=3, but the loader has 100 examples"):
        fit(bbb(3), SIZES["stream"][0]())
    fit(bbb(60), SIZES["stream"][0]())


def test_processes_may_hold_a_share_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    assert known_size(DataLoader(SET, batch_size=10)) == (100, 400)
