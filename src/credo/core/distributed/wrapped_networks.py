"""Checks before a first step: networks wrapped by DDP, FSDP or DataParallel, and undistributed posteriors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from credo.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from credo.core.posterior import Posterior

_SHARDED = "is sharded by FSDP (FullyShardedDataParallel, fully_shard), but a posterior needs whole parameters"
# By class name: the classes themselves are slow to import and rarely used.
_WRAPPERS = {
    "DistributedDataParallel": "is a DistributedDataParallel (DDP), which averages neither draws nor curvatures",
    "DataParallel": "is a DataParallel, whose replicas do not get the sampled weights",
    "FullyShardedDataParallel": _SHARDED,
    "FSDPModule": _SHARDED,
    "DTensor": "is a DTensor, split over processes, but a posterior needs whole parameters",
}


def wrapper_problems(network: nn.Module) -> list[str]:
    """Problems with modules or parameters wrapped for torch's parallel training, the first of each kind."""
    first: dict[str, str] = {}
    things: list[tuple[str, object]] = [*network.named_modules(), *network.named_parameters()]
    for name, thing in things:
        for problem in _problems(thing):
            first.setdefault(problem, name)
    if _SHARDED in first:
        first.pop(_WRAPPERS["DTensor"], None)
    return [
        f"{name or 'it'} {problem}: pass the plain network, and call `group = credo.distribute(posterior)` in every "
        "process before the first step"
        for problem, name in first.items()
    ]


def check_unwrapped(network: nn.Module) -> None:
    """Raise UnsupportedModelError if a network, or a part of it, was wrapped after a posterior was built around it."""
    problems = wrapper_problems(network)
    if problems:
        raise UnsupportedModelError("The posterior's network cannot be used: " + "; ".join(problems) + ".")


def check_alone(posterior: Posterior) -> None:
    """Raise before the first step if the network has been wrapped, or if several processes would train separately."""
    check_unwrapped(posterior)
    count, name = process_count(), type(posterior).__name__
    if posterior.process_group is None and count > 1:
        if not posterior.averages_over_processes:
            raise RuntimeError(
                f"This is one of {count} processes, and {name} does not train over several: run it in one of them. If "
                "each is meant to have its own, call `credo.distribute(posterior, independent=True)` in every process "
                "first, and give each posterior its own seed."
            )
        raise RuntimeError(
            f"This is one of {count} processes, and each would train its own {name}: call "
            "`group = credo.distribute(posterior)` in every process before the first step (for an optimiser of "
            "credo.optim: `credo.distribute(optimizer.posterior)`). DistributedDataParallel (DDP) around the network, "
            "which Lightning and Hugging Face's Trainer use, does not replace it. If the processes are meant to train "
            "different networks: `credo.distribute(posterior, independent=True)`."
        )


def process_count() -> int:
    """World size of torch's default process group; 1 if there is none."""
    return int(dist.get_world_size()) if dist.is_available() and dist.is_initialized() else 1


def _problems(thing: object) -> list[str]:
    kinds = [kind.__name__ for kind in type(thing).__mro__ if kind.__module__.startswith("torch.")]
    # FullyShardedDataParallel marks each module of the network that it wraps.
    managed = [_SHARDED] if getattr(thing, "_is_fsdp_managed_module", False) else []
    return [_WRAPPERS[kind] for kind in kinds if kind in _WRAPPERS] + managed
