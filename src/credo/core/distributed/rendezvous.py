"""Rendezvous with a fresh key prefix for every torchrun restart, so that ranks never read stale addresses."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

_PAUSE = 0.02


def fresh_store(wait: timedelta) -> tuple[Store, int, int]:
    """(store used by the processes of this start only, rank, world size); waits up to `wait` for all ranks.

    torchrun keeps one store over all restarts (pytorch issue 135712), in which gloo and nccl would find the addresses
    of dead processes. So rank 0 chooses a new key prefix and hands it to each rank in reply to a random token: a token
    that has never been used cannot have a stale reply. The restart count is not usable as a prefix, since every host
    keeps its own.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(rendezvous("env://", rank, world, timeout=wait))
    store.set_timeout(wait)
    prefix = _hand_out_prefix(store, world, wait) if rank == 0 else _request_prefix(store, rank)
    return PrefixStore(prefix, store), rank, world


def is_first_to_print(text: str, wait: timedelta = timedelta(seconds=2)) -> bool:
    """Whether this is the first process to ask about `text`, for messages that all ranks would print alike.

    True where torchrun keeps no store, or the store does not reply within `wait`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"credo printed {start} {hashlib.sha256(text.encode()).hexdigest()}"
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return bool(TCPStore(*address, is_master=False, timeout=wait).add(key, 1) == 1)
    except (KeyError, ValueError, RuntimeError):  # better printed twice than not at all
        return True


def _request_prefix(store: Store, rank: int) -> str:
    token = uuid.uuid4().hex
    store.set(f"credo request {rank}", token)
    prefix: str = store.get(f"credo prefix {token}").decode()
    store.set(f"{prefix} joined {rank}", "yes")
    return prefix


def _hand_out_prefix(store: Store, world: int, wait: timedelta) -> str:
    prefix, missing = f"credo {uuid.uuid4().hex}", set(range(1, world))
    limit = time.monotonic() + wait.total_seconds()
    while missing:
        for rank in missing:  # a token of an earlier start gets a reply as well, which nobody reads
            if store.check([f"credo request {rank}"]):
                store.set(f"credo prefix {store.get(f'credo request {rank}').decode()}", prefix)
        missing -= {rank for rank in missing if store.check([f"{prefix} joined {rank}"])}
        if missing and time.monotonic() > limit:
            raise RuntimeError(f"ranks {', '.join(map(str, sorted(missing)))} did not join")
        time.sleep(_PAUSE if missing else 0)
    return prefix
