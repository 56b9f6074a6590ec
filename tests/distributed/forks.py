"""Jobs run by several processes: one imports torch and forks all others, since an import costs more than any job.

They meet at a free port, and leave results in a folder.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from builds import BUILDS

Job = Callable[[int, int, Path], dict[str, Any]]


def load(folder: Path, job: str, world: int) -> list[dict[str, Any]]:
    """What each process found; None for one that did not live to tell."""
    paths = [folder / f"{job} {world} {rank}.pt" for rank in range(world)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]


def work(job: Job, rank: int, world: int, folder: Path, port: int) -> None:
    if world > 1:
        place, wait = f"tcp://127.0.0.1:{port}", timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world, timeout=wait)
    found = job(rank, world, folder)
    torch.save(found, folder / f"{job.__name__} {world} {rank}.pt")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(folder: Path, only: str | None = None, *, jobs: list[tuple[Job, tuple[int, ...]]]) -> None:
    BUILDS["map"]()  # torch imports seconds of itself for the first optimiser
    for job, worlds in jobs:
        for world in worlds if only in (None, job.__name__) else ():
            start, children, port = time.perf_counter(), [], free_port()
            for rank in range(world):
                child = os.fork()
                if child == 0:
                    status = 1
                    try:
                        work(job, rank, world, folder, port)
                        status = 0
                    finally:
                        sys.stderr.flush()
                        os._exit(status)
                children.append(child)
            status = [os.waitpid(child, 0)[1] for child in children]
            sys.stdout.write(f"{job.__name__} {world} {time.perf_counter() - start:.1f} s {status}\n")
