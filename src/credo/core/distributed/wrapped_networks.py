"""Before a first step: networks that torch's own data parallelism wraps, and processes that would each train alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from credo.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from credo.core.posterior import Posterior

_SHARDED = "is sharded by FSDP (FullyShardedDataParallel, fully_shard), but a posterior needs whole parameters"
# By class name: the classes themselves are slow to import, and mostly nobody has used them.
_WRAPPERS = {
    "DistributedDataParallel": "is a DistributedDataParallel (DDP), which averages neither draws nor curvatures",
    "DataParallel": "is a DataParallel, whose replicas are not the network that draws are put into",
    "FullyShardedDataParallel": _SHARDED,
    "FSDPModule": _SHARDED,
    "DTensor": "is a DTensor, of which every process has a part, but a posterior needs whole parameters",
}


def wrapper_problems(network: nn.Module) -> list[str]:
    """What torch's own parallel training has made of a network, the first place of each kind."""
    places: dict[str, str] = {}
    things: list[tuple[str, object]] = [*network.named_modules(), *network.named_parameters()]
    for name, thing in things:
        for problem in _problems(thing):
            places.setdefault(problem, name)
    if _SHARDED in places:
        places.pop(_WRAPPERS["DTensor"], None)
    return [
        f"{name or 'it'} {problem}: give the plain network, and write `group = credo.distribute(posterior)` in every "
        "process before the first step"
        for problem, name in places.items()
    ]


def check_alone(posterior: Posterior) -> None:
    """Before its first step: raise if the network was wrapped meanwhile, or if other processes would train apart."""
    problems = wrapper_problems(posterior)
    if problems:
        raise UnsupportedModelError(f"{type(posterior).__name__} cannot make a step: " + "; ".join(problems) + ".")
    count = process_count()
    if posterior.process_group is None and count > 1:
        raise RuntimeError(
            f"This is one of {count} processes, and each would train its own {type(posterior).__name__}: write "
            "`group = credo.distribute(posterior)` in every process before the first step (for an optimiser of "
            "credo.optim: `credo.distribute(optimizer.posterior)`). DistributedDataParallel (DDP) around the network, "
            "which Lightning and Hugging Face's Trainer use, does not replace it. If the processes are meant to train "
            "different networks: `credo.distribute(posterior, independent=True)`."
        )


def process_count() -> int:
    """How many processes have met in torch's process group; 1 where there is none."""
    return int(dist.get_world_size()) if dist.is_available() and dist.is_initialized() else 1


def _problems(thing: object) -> list[str]:
    kinds = [kind.__name__ for kind in type(thing).__mro__ if kind.__module__.startswith("torch.")]
    # FullyShardedDataParallel around a network leaves a mark on each of its modules.
    managed = [_SHARDED] if getattr(thing, "_is_fsdp_managed_module", False) else []
    return [_WRAPPERS[kind] for kind in kinds if kind in _WRAPPERS] + managed
