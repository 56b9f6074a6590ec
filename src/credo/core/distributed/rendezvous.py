"""Where the processes of one start meet: restarted ones must not find the addresses of those before them."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

_PAUSE = 0.02


def meeting_place(wait: timedelta) -> tuple[Store, int, int]:
    """A store that only the processes of this start write to, this one's rank, and how many they are.

    torchrun keeps one store over all its restarts (pytorch issue 135712): gloo and nccl then read the addresses of
    processes that are dead. So the first process names a new place in it, and tells it to whoever asks with a word of
    his own: a question that nobody asked before has no old answer. The number of restarts would not do as a name, since
    each host counts its own.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(rendezvous("env://", rank, world, timeout=wait))
    store.set_timeout(wait)
    place = _named(store, world, wait) if rank == 0 else _asked(store, rank)
    return PrefixStore(place, store), rank, world


def first_to_say(text: str, wait: timedelta = timedelta(seconds=2)) -> bool:
    """Whether no other process of this start has asked this about the same text; true where torchrun keeps no store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"credo says {start} {hashlib.sha256(text.encode()).hexdigest()}"
    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return bool(TCPStore(*place, is_master=False, timeout=wait).add(key, 1) == 1)
    except (KeyError, ValueError, RuntimeError):  # better said twice than not at all
        return True


def _asked(store: Store, rank: int) -> str:
    word = uuid.uuid4().hex
    store.set(f"credo asks {rank}", word)
    place: str = store.get(f"credo place {word}").decode()
    store.set(f"{place} here {rank}", "yes")
    return place


def _named(store: Store, world: int, wait: timedelta) -> str:
    place, missing = f"credo {uuid.uuid4().hex}", set(range(1, world))
    limit = time.monotonic() + wait.total_seconds()
    while missing:
        for rank in missing:  # a word of an earlier start is answered as well, and nobody reads it
            if store.check([f"credo asks {rank}"]):
                store.set(f"credo place {store.get(f'credo asks {rank}').decode()}", place)
        missing -= {rank for rank in missing if store.check([f"{place} here {rank}"])}
        if missing and time.monotonic() > limit:
            raise RuntimeError(f"ranks {', '.join(map(str, sorted(missing)))} did not come")
        time.sleep(_PAUSE if missing else 0)
    return place
