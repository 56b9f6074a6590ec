"""Training by several processes: who is there, how they are divided, and that all begin alike.

A step reduces one vector over all processes. For P trainable parameters in T tensors it has so many entries of the
network's precision:

    P + T + 2                MAP, MC-dropout, BBB (whose P counts means and deviations); P + T + 1: NodeBNN
    2·P + 1                  VOGN, OGN, IVON (random parameters twice): gradient and curvature
    P + 1 (+ factors)        K-FAC and NoisyKFAC: (inputs + 1)² + outputs² of each layer in the steps that renew factors

Under compress="bfloat16" these have 2 bytes each (and the T, 1 or 2 of them 8). Shared adversarial ascents add one
reduction of the random parameters each, synchronised BatchNorm two of 2·channels for each layer and pass, an ensemble
two of a few numbers.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from credo.core.distributed.collectives import Link
from credo.core.distributed.process_group import COMPRESSIONS, NOISES, Members, ProcessGroup
from credo.core.distributed.rendezvous import meeting_place
from credo.core.distributed.sync_batchnorm import synchronise_
from credo.core.errors import LostProcessError, UnsupportedModelError, unknown
from credo.core.posterior import Posterior
from credo.core.support.validate import checked_count

BATCHNORMS = ("local", "sync")


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
    """Make the steps of a posterior common to all processes that `torchrun` started; also of one that runs alone.

    From then on every process must make every step, on part `group.data_rank` of `group.data_groups` of the batch;
    all parts must be equally large. All begin with the state of rank 0, make the same updates, and raise the same error
    where a loss is not finite; `process_group.settle_(posterior)` belongs before evaluation and checkpoints.

    Args:
        posterior: The same method on the same network in every process.
        mc_groups: So many processes share a part of the data and take different draws.
        noise: `"own"`: each part of the data has its own draws, which makes gradients less noisy (Osawa et al. 2019).
            `"shared"`: the same draws for all, as one process with the whole batch would have them: its very numbers.
        compress: `"bfloat16"` halves what is sent; gradients and curvatures are rounded to 8 bits of precision.
        batchnorm: `"local"`: BatchNorm takes the statistics of the part. `"sync"`: those of the whole batch, at two
            small exchanges a layer and pass; in training mode all processes must make every pass.
        timeout: Seconds after which a process that does not answer is an error (`LostProcessError`).
        independent: True where each process trains a network of its own on purpose: it is then a process group of one,
            and exchanges nothing. Give each posterior a seed of its own. By default processes train together, and
            without this call the first step raises where there are several: replicas would drift apart.

    Members of an ensemble are trained by different processes: several by one, or each by equally many. Then the parts
    of a batch are for those that train the same member.
    """
    _check(posterior, mc_groups, noise, compress, batchnorm, timeout)
    if not independent:
        _check_steps(posterior)
    wait = timedelta(seconds=timeout)
    members = len(posterior.parts) if posterior.parts[0] is not posterior else None
    # Before they meet: who leaves at once breaks the connections of the others.
    _share(1 if independent else _count(), members, mc_groups)
    world = Link(None, posterior.device) if independent else _world(posterior.device, wait)
    process_group = _divided(world, members, mc_groups, wait, {"noise": noise, "compress": compress})
    _begin_alike(posterior, process_group)
    inner = process_group if process_group.members is None else process_group.members.process_group
    for module in posterior.modules():
        if isinstance(module, Posterior):
            module.process_group = inner
    posterior.process_group = process_group
    if batchnorm == "sync":
        synchronise_(posterior, inner.peers)
    return process_group


def join(timeout: float = 300.0, device: torch.device | str = "cpu") -> ProcessGroup:
    """All processes that `torchrun` started, as a group without a posterior: to agree on what precedes training."""
    world = _world(torch.device(device), timedelta(seconds=timeout))
    return ProcessGroup(world, world)


def leave() -> None:
    """Leave the other processes once all is done: a Python that ends while gloo's threads run may abort (SIGABRT)."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _count() -> int:
    """How many processes there are, without asking them."""
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    return int(os.environ.get("WORLD_SIZE", 1)) if dist.is_available() else 1


def _world(device: torch.device, wait: timedelta) -> Link:
    """All processes: those that have met already, those that torchrun started, or this one alone."""
    if not dist.is_available():
        return Link(None, device)
    try:
        if dist.is_initialized():
            return Link(dist.new_group(timeout=wait) if dist.get_world_size() > 1 else None, device)
        if _count() == 1:
            return Link(None, device)
        store, rank, count = meeting_place(wait)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=wait)
    except (RuntimeError, ValueError, KeyError) as error:
        where = ", ".join(
            f"{key}={os.environ.get(key)}" for key in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
        )
        raise LostProcessError(
            f"The processes did not meet within {wait.total_seconds():g} s ({where}): start all of them by torchrun, "
            f"with an address that every host can reach. ({error})"
        ) from error
    return Link(dist.group.WORLD, device)


def _share(size: int, members: int | None, mc_groups: int) -> int:
    """How many of `size` processes train the same member."""
    count = members or 1
    if size > count and size % count:
        raise ValueError(
            f"{size} processes cannot train {count} members by equally many each: take a multiple of {count}, "
            f"or {count} at most."
        )
    each = max(1, size // count)
    if each % mc_groups:
        raise ValueError(
            f"mc_groups={mc_groups} does not divide the {each} processes" + (" of each member." if members else ".")
        )
    return each


def _divided(world: Link, members: int | None, mc_groups: int, wait: timedelta, common: dict[str, Any]) -> ProcessGroup:
    """The process group of this process, for an ensemble with the smaller one that trains its members."""
    count, each = members or 1, _share(world.size, members, mc_groups)
    lists = [[*range(start, start + each)] for start in range(0, world.size, each)]
    by_draw = [ranks[first::mc_groups] for ranks in lists for first in range(mc_groups)]
    link = world if len(lists) == 1 else world.part(lists, timeout=wait)
    peers = link if mc_groups == 1 else world.part(by_draw, timeout=wait)
    process_group = ProcessGroup(link, peers, mc_groups=mc_groups, **common)
    if members is None:
        return process_group
    owners = tuple(member % len(lists) * each for member in range(count))
    own = tuple(member for member in range(count) if member % len(lists) == world.rank // each)
    return ProcessGroup(world, world, mc_groups=mc_groups, members=Members(process_group, own, owners), **common)


def _begin_alike(posterior: Posterior, process_group: ProcessGroup) -> None:
    """The state of rank 0 for all, who must have built the same."""
    own = [
        [type(part).__name__, part.data_size, part.config(), {n: list(p.shape) for n, p in part.named_parameters()}]
        for part in (posterior, *posterior.parts)
    ]
    if process_group.agree(process_group.share(own) != own):
        raise ValueError(
            "The processes have different posteriors: build the same in each, with the same options, and with the "
            "data_size of the whole data set."
        )
    state = process_group.share(posterior.state_dict() if process_group.is_first else None)
    if not process_group.is_first:
        posterior.load_state_dict(state)


def _check(
    posterior: Posterior, mc_groups: int, noise: str, compress: str | None, batchnorm: str, timeout: float
) -> None:
    checked_count("mc_groups", mc_groups, what="processes with draws of their own")
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
            f"mc_groups={mc_groups} spreads draws over processes, but {type(posterior.parts[0]).__name__} has none: "
            "leave it at 1, so that each process has its part of the data."
        )


def _check_steps(posterior: Posterior) -> None:
    lonely = [
        type(m).__name__ for m in posterior.modules() if isinstance(m, Posterior) and not m.averages_over_processes
    ]
    if lonely:
        raise UnsupportedModelError(
            f"{lonely[0]} makes every step alone, so the processes would part. A method of your own can be distributed "
            "if its steps average gradients by ProcessGroup.average_step_, as OptimizerStep does it in "
            "guarded(self.process_group); "
            "then say so: averages_over_processes = True. If the processes are meant to train different networks: "
            "independent=True."
        )
