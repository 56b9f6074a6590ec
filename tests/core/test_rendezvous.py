"""After a torchrun restart, processes find each other, not those of the previous start."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch import nn
from torch.distributed import HashStore, TCPStore

import credo
from credo.core.distributed import rendezvous
from credo.core.distributed.setup import join

WAIT = timedelta(seconds=20)


def prefixes(store: HashStore, world: int, seed: int) -> list[str]:
    """The key prefix that each of `world` processes gets; they arrive in random order."""
    chance = random.Random(seed)
    delays = [chance.uniform(0, 0.1) for _ in range(world)]

    def join_as(rank: int) -> str:
        time.sleep(delays[rank])
        if rank == 0:
            return rendezvous._hand_out_prefix(store, world, WAIT)
        return rendezvous._request_prefix(store, rank)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(join_as, range(world)))


def test_each_start_has_its_own_prefix_in_the_same_store() -> None:
    store = HashStore()
    store.set_timeout(WAIT)
    found = [prefixes(store, world, seed) for seed, world in enumerate((4, 4, 2, 4, 3))]
    assert all(len(set(start)) == 1 for start in found)
    assert len({start[0] for start in found}) == 5


def test_a_request_of_a_dead_process_is_ignored() -> None:
    store = HashStore()
    store.set_timeout(WAIT)
    store.set("credo request 1", "token of a dead process")
    store.set("credo request 2", "another")
    assert len(set(prefixes(store, 3, seed=0))) == 1


def test_nobody_joins() -> None:
    with pytest.raises(RuntimeError, match="ranks 1, 2 did not join"):
        rendezvous._hand_out_prefix(HashStore(), 3, timedelta(seconds=0.05))


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """torchrun's store, and the environment of its workers."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    return store


def test_a_message_is_printed_once_per_start(agent: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(rendezvous.is_first_to_print, ["Unknown key."] * 4)) == 1
    assert rendezvous.is_first_to_print("Another error.")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert rendezvous.is_first_to_print("Unknown key.")


def test_without_a_store_every_process_prints(agent: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = timedelta(seconds=0.3)
    monkeypatch.setenv("MASTER_PORT", "9")  # nobody is there
    assert [rendezvous.is_first_to_print("Unknown key.", wait) for _ in range(2)] == [True, True]
    monkeypatch.delenv("MASTER_PORT")
    assert [rendezvous.is_first_to_print("Unknown key.", wait) for _ in range(2)] == [True, True]
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert [rendezvous.is_first_to_print("Unknown key.") for _ in range(2)] == [True, True]


def test_a_single_process_joins_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    process_group = join(1.0)
    assert (process_group.rank, process_group.world) == (0, 1)


def test_an_impossible_division_raises_before_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raising after it would break the connections of the others, which would report a lost process instead."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("credo.core.distributed.setup._world", lambda *given: pytest.fail("the rendezvous was reached"))
    posterior = credo.Ensemble([credo.BBB(nn.Linear(2, 1), data_size=4, seed=seed) for seed in range(2)])
    with pytest.raises(ValueError, match="mc_groups=2 does not divide the 1 processes of each member"):
        credo.distribute(posterior, mc_groups=2)
