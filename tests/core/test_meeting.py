"""Processes that torchrun starts again meet each other, not those that are dead."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch import nn
from torch.distributed import HashStore, TCPStore

import credo
from credo.core.distributed import rendezvous as meeting
from credo.core.distributed.setup import join

WAIT = timedelta(seconds=20)


def places(store: HashStore, world: int, seed: int) -> list[str]:
    """Where each of `world` processes believes to meet the others, who come in any order."""
    chance = random.Random(seed)
    delays = [chance.uniform(0, 0.1) for _ in range(world)]

    def come(rank: int) -> str:
        time.sleep(delays[rank])
        return meeting._asked(store, rank) if rank else meeting._named(store, world, WAIT)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(come, range(world)))


def test_each_start_has_a_place_of_its_own_in_the_same_store() -> None:
    store = HashStore()
    store.set_timeout(WAIT)
    found = [places(store, world, seed) for seed, world in enumerate((4, 4, 2, 4, 3))]
    assert all(len(set(named)) == 1 for named in found)
    assert len({named[0] for named in found}) == 5


def test_who_was_killed_while_asking_is_not_waited_for() -> None:
    store = HashStore()
    store.set_timeout(WAIT)
    store.set("credo asks 1", "a word of somebody who is dead")
    store.set("credo asks 2", "another")
    assert len(set(places(store, 3, seed=0))) == 1


def test_nobody_comes() -> None:
    with pytest.raises(RuntimeError, match="ranks 1, 2 did not come"):
        meeting._named(HashStore(), 3, timedelta(seconds=0.05))


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """A store as torchrun keeps it, and what it tells its workers."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    return store


def test_the_same_is_said_once_by_each_start(agent: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(meeting.first_to_say, ["Unknown key."] * 4)) == 1
    assert meeting.first_to_say("Another error.")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert meeting.first_to_say("Unknown key.")


def test_who_cannot_ask_says_it(agent: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = timedelta(seconds=0.3)
    monkeypatch.setenv("MASTER_PORT", "9")  # nobody is there
    assert [meeting.first_to_say("Unknown key.", wait) for _ in range(2)] == [True, True]
    monkeypatch.delenv("MASTER_PORT")
    assert [meeting.first_to_say("Unknown key.", wait) for _ in range(2)] == [True, True]
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert [meeting.first_to_say("Unknown key.") for _ in range(2)] == [True, True]


def test_alone_there_is_nobody_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    process_group = join(1.0)
    assert (process_group.rank, process_group.world) == (0, 1)


def test_a_wrong_division_is_refused_before_anybody_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who left after the meeting would break the connections of the others, who then see a lost process instead."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("credo.core.distributed.setup._world", lambda *given: pytest.fail("it went to the meeting"))
    posterior = credo.Ensemble([credo.BBB(nn.Linear(2, 1), data_size=4, seed=seed) for seed in range(2)])
    with pytest.raises(ValueError, match="mc_groups=2 does not divide the 1 processes of each member"):
        credo.distribute(posterior, mc_groups=2)
