"""What processes that train together must do alike, with a team that is only played."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from credo.core.errors import CredoError
from credo.core.files import DiskFullError
from credo.data import Batches, Split
from credo.training import pauses
from credo.training.pauses import Pauses
from credo.training.scale import check_shares
from credo.training.together import first_does, from_first


class Played:
    """One of `world` processes; what the others say is given."""

    def __init__(self, rank: int = 0, world: int = 2, *, others: bool = False, first: Any = None) -> None:
        self.rank, self.world, self.others, self.first = rank, world, others, first
        self.data_rank, self.data_groups, self.is_first = rank, world, rank == 0
        self.exchanges = 0

    def agree(self, flag: bool) -> bool:
        self.exchanges += 1
        return flag or self.others

    def share(self, thing: Any) -> Any:
        self.exchanges += 1
        return thing if self.is_first else self.first


def full() -> None:
    raise DiskFullError("no space")


def test_the_first_does_it_and_the_others_wait() -> None:
    done: list[int] = []
    for rank in (0, 1):
        team: Any = Played(rank)
        assert first_does(team, lambda rank=rank: done.append(rank) or "value") == (None if rank else "value")
        assert team.exchanges == 1
    assert done == [0]
    assert first_does(None, lambda: 3) == 3


def test_if_the_first_fails_all_do() -> None:
    first: Any = Played(0)
    with pytest.raises(DiskFullError, match="no space"):
        first_does(first, full)
    assert first.exchanges == 1  # the others were told before it raised
    other: Any = Played(1, others=True)
    with pytest.raises(CredoError, match=r"rank 0.* failed and said why"):
        first_does(other, full)


def test_the_value_of_the_first_is_everybodys() -> None:
    other: Any = Played(1, first=b"content")
    assert from_first(other, None) == b"content"
    assert from_first(None, b"mine") == b"mine"


def test_a_stop_of_anybody_is_one_of_all() -> None:
    for team, asked in ((Played(1, first=(False, 1)), True), (Played(0, others=True), False)):
        waiting = Pauses(team, every=None, minutes=None, stop=lambda asked=asked: asked)  # type: ignore[arg-type]
        assert waiting.after(1) == (False, True)


def test_the_clock_of_the_first_decides_and_counted_steps_need_no_exchange() -> None:
    team: Any = Played(1, first=(True, 50))
    other = Pauses(team, every=10, minutes=1e9, stop=lambda: False)
    assert other.after(1) == (True, False)  # though its own clock says nothing
    exchanges = team.exchanges
    assert [step for step in range(2, 50) if other.after(step)[0]] == [10, 20, 30, 40]
    assert team.exchanges == exchanges


def test_all_look_at_signals_about_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(pauses.time, "monotonic", lambda: now)
    for seconds, most in ((0.001, 12), (0.1, 110), (5.0, 1000)):  # a step, and the looks in a thousand of them
        team: Any = Played(0)
        looked = Pauses(team, every=None, minutes=None, stop=None)
        for step in range(1000):
            now += seconds
            looked.after(step + 1)
        assert team.exchanges / 2 <= most
        assert team.exchanges / 2 >= most * 0.8


SPLIT = Split(torch.arange(24.0).unsqueeze(1), torch.zeros(24, dtype=torch.long))
DATA = TensorDataset(SPLIT.x, SPLIT.y)


def test_loaders_must_give_each_process_its_part() -> None:
    team: Any = Played(1)
    whole = Batches(SPLIT, batch_size=6)
    check_shares(None, whole)
    check_shares(team, whole.shard(1, 2))
    with pytest.raises(ValueError, match=r"part 0 of 1, this process has part 1 of 2.*loader\.shard"):
        check_shares(team, whole)
    check_shares(team, DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=2, rank=1)))
    for sampler in (None, DistributedSampler(DATA, num_replicas=3, rank=1)):
        with pytest.raises(ValueError, match="DistributedSampler"):
            check_shares(team, DataLoader(DATA, sampler=sampler))
    check_shares(team, [(SPLIT.x, SPLIT.y)])  # nobody knows


def test_a_batch_that_cannot_be_shared_equally() -> None:
    with pytest.raises(ValueError, match=r"batch_size=6 is the batch of all processes together.*multiple of 4"):
        Batches(SPLIT, batch_size=6).shard(0, 4)
