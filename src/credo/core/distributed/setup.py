"""Set up distributed training: join the processes, assign data shards and draws, start from the same state.

A step reduces one vector over all processes. For P trainable parameters in T tensors, its number of entries (in the
network's precision) is:

    P + T + 2                MAP, SWAG, SGLD, SGHMC, MC-dropout, BBB (P: means and deviations); P + T + 1: NodeBNN
    2·P + 1                  VOGN, OGN, IVON (random parameters twice): gradient and curvature
    P + 1 (+ factors)        K-FAC and NoisyKFAC: (inputs + 1)² + outputs² per layer when the factors are updated

With compress="bfloat16" each takes 2 bytes (the T, 1 or 2 others 8). Adversarial ascents under shared noise add one
reduction of the random parameters each, synchronised BatchNorm two of 2·channels per layer and pass, an ensemble two of
a few numbers.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from credo.core.distributed.collectives import Communicator
from credo.core.distributed.process_group import COMPRESSIONS, NOISES, Members, ProcessGroup
from credo.core.distributed.rendezvous import fresh_store
from credo.core.distributed.sync_batchnorm import synchronise_
from credo.core.errors import LostProcessError, UnsupportedModelError, unknown
from credo.core.posterior import Posterior
from credo.core.support.keywords import checked_keywords
from credo.core.support.validate import checked_count

BATCHNORMS = ("local", "sync")


@checked_keywords()
def distribute(
    posterior: Posterior,
    *,
    mc_groups: int = 1,
    noise: str = "own",
    compress: str | None = None,
    batchnorm: str = "local",
    timeout: float = 300.0,
    independent: bool = False,
) -> ProcessGroup:
    """Train a posterior jointly in all processes that `torchrun` started; a single process is a group of one.

    From then on every process must make every step, on shard `group.data_rank` of `group.data_groups` of the batch; all
    shards must have the same size. All processes start from the state of rank 0, make the same updates, and raise the
    same error if a loss is not finite. Call `group.settle_(posterior)` before evaluation and checkpoints.

    Members of an ensemble are trained by different processes: several by one process, or each by equally many, which
    then split the batch among them.

    Args:
        posterior: The same method on the same network in every process.
        mc_groups: Number of processes that share a data shard under different draws.
        noise: `"own"`: each data shard has its own draws, so gradients are less noisy (Osawa et al. 2019). `"shared"`:
            all shards have the same draws, and training gives the numbers of a single process with the whole batch.
        compress: `"bfloat16"` halves the bytes sent; gradients and curvatures are rounded to 8 bits of precision.
        batchnorm: `"local"`: BatchNorm uses the statistics of the shard. `"sync"`: those of the whole batch, for two
            small reductions per layer and pass; in training mode all processes must make every forward pass.
        timeout: Seconds to wait for other processes before raising `LostProcessError`.
        independent: True if the processes deliberately train different networks: each is a group of one and exchanges
            nothing; give each posterior its own seed. Otherwise several processes without `distribute` are an error at
            the first step, because the replicas would diverge.
    """
    _check(posterior, mc_groups, noise, compress, batchnorm, timeout)
    if not independent:
        _check_steps(posterior)
    wait = timedelta(seconds=timeout)
    members = len(posterior.parts) if posterior.parts[0] is not posterior else None
    # Before the rendezvous: a process that raises after it breaks the connections of the others.
    _ranks_per_member(1 if independent else _count(), members, mc_groups)
    world = Communicator(None, posterior.device) if independent else _world(posterior.device, wait)
    process_group = _make_group(world, members, mc_groups, wait, {"noise": noise, "compress": compress})
    _load_first_state(posterior, process_group)
    inner = process_group if process_group.members is None else process_group.members.process_group
    for module in posterior.modules():
        if isinstance(module, Posterior):
            module.process_group = inner
    posterior.process_group = process_group
    if batchnorm == "sync":
        synchronise_(posterior, inner.peers)
    return process_group


def join(timeout: float = 300.0, device: torch.device | str = "cpu") -> ProcessGroup:
    """All processes that `torchrun` started, as a group without a posterior, to coordinate before training.

    Args:
        timeout: Seconds to wait for the other processes before raising `LostProcessError`.
        device: Device of the tensors to exchange; chooses nccl or gloo.
    """
    world = _world(torch.device(device), timedelta(seconds=timeout))
    return ProcessGroup(world, world)


def leave() -> None:
    """Destroy torch's process group at the end of a script: exiting while gloo's threads run may abort (SIGABRT)."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _count() -> int:
    """World size, known before the rendezvous."""
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    return int(os.environ.get("WORLD_SIZE", 1)) if dist.is_available() else 1


def _world(device: torch.device, wait: timedelta) -> Communicator:
    """Communicator over torch's existing process group, the processes that torchrun started, or this process."""
    if not dist.is_available():
        return Communicator(None, device)
    try:
        if dist.is_initialized():
            return Communicator(dist.new_group(timeout=wait) if dist.get_world_size() > 1 else None, device)
        if _count() == 1:
            return Communicator(None, device)
        store, rank, count = fresh_store(wait)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=wait)
    except (RuntimeError, ValueError, KeyError) as error:
        where = ", ".join(
            f"{key}={os.environ.get(key)}" for key in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
        )
        raise LostProcessError(
            f"The processes did not connect within {wait.total_seconds():g} s ({where}): start all of them with "
            f"torchrun, and an address that every host can reach. ({error})"
        ) from error
    return Communicator(dist.group.WORLD, device)


def _ranks_per_member(size: int, members: int | None, mc_groups: int) -> int:
    count = members or 1
    if size > count and size % count:
        raise ValueError(
            f"{size} processes cannot be divided equally among {count} members: use a multiple of {count}, or at most "
            f"{count}."
        )
    each = max(1, size // count)
    if each % mc_groups:
        raise ValueError(
            f"mc_groups={mc_groups} does not divide the {each} processes" + (" of each member." if members else ".")
        )
    return each


def _make_group(
    world: Communicator, members: int | None, mc_groups: int, wait: timedelta, common: dict[str, Any]
) -> ProcessGroup:
    """The group of all ranks; for an ensemble, it contains the group of the ranks that train the same members."""
    count, each = members or 1, _ranks_per_member(world.size, members, mc_groups)
    lists = [[*range(start, start + each)] for start in range(0, world.size, each)]
    by_draw = [ranks[first::mc_groups] for ranks in lists for first in range(mc_groups)]
    comm = world if len(lists) == 1 else world.split(lists, timeout=wait)
    peers = comm if mc_groups == 1 else world.split(by_draw, timeout=wait)
    process_group = ProcessGroup(comm, peers, mc_groups=mc_groups, **common)
    if members is None:
        return process_group
    owners = tuple(member % len(lists) * each for member in range(count))
    own = tuple(member for member in range(count) if member % len(lists) == world.rank // each)
    return ProcessGroup(world, world, mc_groups=mc_groups, members=Members(process_group, own, owners), **common)


def _load_first_state(posterior: Posterior, process_group: ProcessGroup) -> None:
    """Load the state of rank 0 everywhere; raise ValueError if the ranks built different posteriors."""
    own = [
        [type(part).__name__, part.data_size, part.config(), {n: list(p.shape) for n, p in part.named_parameters()}]
        for part in (posterior, *posterior.parts)
    ]
    if process_group.agree(process_group.share(own) != own):
        raise ValueError(
            "The processes have different posteriors: build the same one in each, with the same options and the "
            "data_size of the whole data set."
        )
    state = process_group.share(posterior.state_dict() if process_group.is_first else None)
    if not process_group.is_first:
        posterior.load_state_dict(state)


def _check(
    posterior: Posterior, mc_groups: int, noise: str, compress: str | None, batchnorm: str, timeout: float
) -> None:
    checked_count("mc_groups", mc_groups, what="processes with their own draws")
    if noise not in NOISES:
        raise ValueError(unknown("noise", str(noise), NOISES))
    if compress not in COMPRESSIONS:
        raise ValueError(f"compress={compress!r}: possible are {', '.join(map(repr, COMPRESSIONS))}.")
    if batchnorm not in BATCHNORMS:
        raise ValueError(unknown("batchnorm", str(batchnorm), BATCHNORMS))
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout={timeout} must be a positive number of seconds.")
    if mc_groups > 1 and not all(part.is_random for part in posterior.parts):
        raise ValueError(
            f"mc_groups={mc_groups} distributes draws over processes, but {type(posterior.parts[0]).__name__} has "
            "none: leave it at 1, so that each process gets its own data shard."
        )


def _check_steps(posterior: Posterior) -> None:
    unaware = [
        type(m).__name__ for m in posterior.modules() if isinstance(m, Posterior) and not m.averages_over_processes
    ]
    if unaware:
        raise UnsupportedModelError(
            f"{unaware[0]} does not average its steps over processes, so the replicas would diverge. To distribute "
            "your own method, average gradients with ProcessGroup.average_step_, as OptimizerStep does within "
            "guarded(self.process_group), and set averages_over_processes = True. If the processes are meant "
            "to train different networks: independent=True."
        )
