"""What processes that train together must do alike, with a process group that is only played."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import credo
from credo.core.distributed.sync_batchnorm import SyncedBatchNorm1d
from credo.core.errors import CredoError
from credo.core.support.files import DiskFullError
from credo.data import Batches, Split
from credo.training import checkpoint_timer, validation
from credo.training.checkpoint_timer import CheckpointTimer
from credo.training.loader_checks import check_shares, check_statistics, check_whole
from credo.training.rank_zero import all_do, first_does, from_first


class Played:
    """One of `world` processes; what the others say is given."""

    def __init__(self, rank: int = 0, world: int = 2, *, others: bool = False, first: Any = None) -> None:
        self.rank, self.world, self.others, self.first = rank, world, others, first
        self.data_rank, self.data_groups, self.is_first = rank, world, rank == 0
        self.exchanges = 0
        self.shared: list[Any] = []

    def agree(self, flag: bool) -> bool:
        self.exchanges += 1
        return flag or self.others

    def share(self, thing: Any) -> Any:
        self.exchanges += 1
        self.shared.append(thing)
        return thing if self.is_first else self.first

    def average_(self, tensors: list[Any], numbers: list[float]) -> list[float]:
        return [(number + self.others) / 2 for number in numbers]


def full() -> None:
    raise DiskFullError("no space")


def test_the_first_does_it_and_the_others_wait() -> None:
    done: list[int] = []
    for rank in (0, 1):
        process_group: Any = Played(rank)
        assert first_does(process_group, lambda rank=rank: done.append(rank) or "value") == (None if rank else "value")
        assert process_group.exchanges == 1
    assert done == [0]
    assert first_does(None, lambda: 3) == 3


def test_if_the_first_fails_all_do() -> None:
    first: Any = Played(0)
    with pytest.raises(DiskFullError, match="no space"):
        first_does(first, full)
    assert first.exchanges == 1  # the others were told before it raised
    other: Any = Played(1, others=True)
    with pytest.raises(CredoError, match=r"rank 0.* failed, see its error"):
        first_does(other, full)


def test_the_value_of_the_first_is_everybodys() -> None:
    other: Any = Played(1, first=b"content")
    assert from_first(other, None) == b"content"
    assert from_first(None, b"mine") == b"mine"


def test_a_stop_of_anybody_is_one_of_all() -> None:
    for process_group, asked in ((Played(1, first=(False, 1)), True), (Played(0, others=True), False)):
        waiting = CheckpointTimer(process_group, every=None, minutes=None, stop=lambda asked=asked: asked)  # type: ignore[arg-type]
        assert waiting.after(1) == (False, True)


def test_the_clock_of_the_first_decides_and_counted_steps_need_no_exchange() -> None:
    process_group: Any = Played(1, first=(True, 50))
    other = CheckpointTimer(process_group, every=10, minutes=1e9, stop=lambda: False)
    assert other.after(1) == (True, False)  # though its own clock says nothing
    exchanges = process_group.exchanges
    assert [step for step in range(2, 50) if other.after(step)[0]] == [10, 20, 30, 40]
    assert process_group.exchanges == exchanges


def test_all_look_at_signals_about_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(checkpoint_timer.time, "monotonic", lambda: now)
    for seconds, most in ((0.001, 12), (0.1, 110), (5.0, 1000)):  # a step, and the looks in a thousand of them
        process_group: Any = Played(0)
        looked = CheckpointTimer(process_group, every=None, minutes=None, stop=None)
        for step in range(1000):
            now += seconds
            looked.after(step + 1)
        assert process_group.exchanges / 2 <= most
        assert process_group.exchanges / 2 >= most * 0.8


SPLIT = Split(torch.arange(24.0).unsqueeze(1), torch.zeros(24, dtype=torch.long))
DATA = TensorDataset(SPLIT.x, SPLIT.y)


def test_loaders_must_give_each_process_its_part() -> None:
    process_group: Any = Played(1)
    whole = Batches(SPLIT, batch_size=6)
    check_shares(None, whole)
    check_shares(process_group, whole.shard(1, 2))
    with pytest.raises(ValueError, match=r"shard 0 of 1, this process has shard 1 of 2.*loader\.shard"):
        check_shares(process_group, whole)
    check_shares(process_group, DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=2, rank=1)))
    for sampler in (None, DistributedSampler(DATA, num_replicas=3, rank=1)):
        with pytest.raises(ValueError, match="DistributedSampler"):
            check_shares(process_group, DataLoader(DATA, sampler=sampler))
    check_shares(process_group, [(SPLIT.x, SPLIT.y)])  # nobody knows


def test_a_batch_that_cannot_be_shared_equally() -> None:
    with pytest.raises(ValueError, match=r"batch_size=6 is the batch of all processes together.*multiple of 4"):
        Batches(SPLIT, batch_size=6).shard(0, 4)


def test_validation_data_are_given_whole() -> None:
    process_group: Any = Played(1)
    whole = Batches(SPLIT, batch_size=6)
    for fine in (None, whole, [(SPLIT.x, SPLIT.y)], DataLoader(DATA)):
        check_whole(process_group, fine)
    check_whole(None, whole.shard(1, 2))
    for divided in (whole.shard(1, 2), DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=2, rank=1))):
        with pytest.raises(ValueError, match="one of 2 shards: give the whole validation set to every process"):
            check_whole(process_group, divided)


# -- what all must want alike --------------------------------------------------------------------------------


def trained(process_group: Any, **options: Any) -> None:
    posterior = credo.MAP(nn.Linear(1, 2), data_size=24)
    posterior.process_group = process_group
    list(credo.train(posterior, [(SPLIT.x, SPLIT.y)], **{"epochs": 2, **options}))


def wishes() -> dict[str, Any]:
    """What a process says that it wants."""
    first = Played(0, others=True)
    with pytest.raises(CredoError):  # of another process, behind the checks of its own
        trained(first)
    first.others = False
    with pytest.raises(AttributeError):  # a played process_group makes no steps
        trained(first)
    found: dict[str, Any] = first.shared[0]
    return found


OTHERS: dict[str, dict[str, Any]] = {
    "epochs": {"epochs": 3},
    "seed": {"seed": 1},
    "checkpoint": {"checkpoint": "c.pt"},
    "checkpoint_every": {"checkpoint_every": 7},
    "checkpoint_minutes": {"checkpoint_minutes": None},
    "monitor": {"monitor": "accuracy"},
    "schedule": {"schedule": "constant"},
    "validation": {"validation": [(SPLIT.x, SPLIT.y)]},
    "validation_draws": {"validation_draws": 9},
    "patience": {"patience": 2, "validation": [(SPLIT.x, SPLIT.y)]},
}


@pytest.mark.parametrize("what", OTHERS)
def test_processes_that_want_different_trainings_are_told_before_the_first_step(what: str) -> None:
    process_group = Played(1, first=wishes())
    with pytest.raises(ValueError, match=rf"(?s)ask for different trainings.*\b{what}: .* here, .* in process 0"):
        trained(process_group, **OTHERS[what])


def test_loaders_of_different_length_are_told_on_the_first_process_too() -> None:
    with pytest.raises(ValueError, match=r"len\(loader\): 1 here, 2 in process 0"):
        trained(Played(1, first={**wishes(), "len(loader)": 2}))
    first: Any = Played(0)
    first.average_ = lambda tensors, numbers: [0.0, 0.5, *numbers[2:]]
    with pytest.raises(ValueError, match=r"different trainings \(len\(loader\): 1 here, another value in another"):
        trained(first)


def test_a_check_that_fails_for_one_fails_for_all() -> None:
    failing: Any = Played(1)
    with pytest.raises(DiskFullError):
        all_do(failing, full)
    assert failing.exchanges == 1  # the others were told before it raised
    other: Any = Played(0, others=True)
    with pytest.raises(CredoError, match="Another process failed"):
        all_do(other, lambda: None)


def test_early_stopping_follows_the_numbers_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding may differ between machines."""
    monkeypatch.setattr(validation, "predict", lambda *given, **options: None)
    monkeypatch.setattr(validation, "quick_metrics", lambda prediction: {"nll": 0.1})
    posterior = credo.MAP(nn.Linear(1, 2), data_size=24)
    played: Any = Played(1, first={"nll": 0.1 + 1e-9})
    posterior.process_group = played
    assert validation.validate(posterior, [], 1, 0) == {"nll": 0.1 + 1e-9}


# -- BatchNorm of a part ------------------------------------------------------------------------------------


def check_last_part(examples: int, layer: nn.Module, *, drop_last: bool = False, groups: int = 2) -> None:
    split = Split(torch.zeros(examples, 3), torch.zeros(examples, dtype=torch.long))
    posterior = credo.MAP(nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2)), data_size=examples)
    played: Any = Played(0, groups)
    posterior.process_group = played
    check_statistics(posterior, Batches(split, batch_size=128, drop_last=drop_last).shard(0, groups))


def test_batchnorm_has_no_statistics_of_one_example() -> None:
    with pytest.raises(ValueError, match=r"130 examples in batches of 128.*2 processes.*--sync-batchnorm.*drop_last"):
        check_last_part(130, nn.BatchNorm1d(4))
    check_last_part(130, nn.BatchNorm1d(4), drop_last=True)
    synced: Any = SyncedBatchNorm1d(4)
    synced.comm = SimpleNamespace(size=2)
    check_last_part(130, synced)
    check_last_part(130, nn.ReLU())
    check_last_part(131, nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="4 processes"):
        check_last_part(131, nn.BatchNorm1d(4), groups=4)
