"""The [distributed] section of an experiment, for processes started by torchrun."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from credo.core.distributed.process_group import NOISES
from credo.core.distributed.setup import BATCHNORMS
from credo.core.errors import unknown
from credo.experiments.options import NONE, check_types


@dataclass(frozen=True)
class Distributed:
    """Options of `credo.distribute`; a single process with this section is a process group of one.

    A run may resume with another number of processes or `mc_groups`; the other options must stay the same.

    Attributes:
        mc_groups: Number of groups with different weight draws.
        noise: `"own"` noise of each process, or `"shared"`.
        compress: `"bfloat16"` halves the traffic; None for full precision.
        batchnorm: `"local"` statistics of each process, or `"sync"`.
        timeout: Seconds to wait for other processes.
    """

    mc_groups: int = 1
    noise: str = "own"
    compress: str | None = None
    batchnorm: str = "local"
    timeout: float = 300.0


def make_distributed(table: Mapping[str, Any]) -> Distributed:
    """Validate the section."""
    known = asdict(Distributed())
    for key in table:
        if key not in known:
            raise ValueError(unknown("option of distributed", key, known))
    table = {key: None if value == NONE else value for key, value in table.items()}
    given = {key: value for key, value in table.items() if value is not None}
    check_types("distributed", given, known)
    for key, choices in (("noise", NOISES), ("batchnorm", BATCHNORMS)):
        if given.get(key, choices[0]) not in choices:
            raise ValueError(unknown(f"distributed.{key}", str(given[key]), choices))
    if given.get("compress", "bfloat16") != "bfloat16":
        raise ValueError(f"distributed.compress={given['compress']!r}: possible are 'bfloat16' and 'none'.")
    return Distributed(**given)


def fitted(options: Distributed, world: int, members: int = 1) -> Distributed:
    """The `options` with as many of its MC groups as `world` processes for `members` ensemble members allow."""
    each = _each(world, members)
    return replace(options, mc_groups=max(n for n in range(1, max(options.mc_groups, 1) + 1) if each % n == 0))


def check_batch_size(batch_size: int, options: Distributed, world: int, members: int = 1) -> None:
    """Raise ValueError if `world` processes for `members` ensemble members cannot divide `batch_size` by `options`."""
    parts, rest = divmod(_each(world, members), options.mc_groups)
    if rest or batch_size % parts == 0:  # groups are validated by `distribute`
        return
    possible = [n for n in range(1, 2 * world + 1) if _can_share(batch_size, options.mc_groups, n, members)]
    groups = f" with mc_groups={options.mc_groups}" if options.mc_groups > 1 else ""
    raise ValueError(
        f"training.batch_size={batch_size} is the batch of all processes together, and {world} processes{groups} "
        f"cannot divide it into {parts} equal parts. Start {_listed(possible)} processes{groups}, or a new run with a "
        f"batch_size that is a multiple of {parts}."
    )


def _can_share(batch_size: int, mc_groups: int, world: int, members: int) -> bool:
    each = _each(world, members)
    return (
        (world <= members or world % members == 0) and each % mc_groups == 0 and batch_size % (each // mc_groups) == 0
    )


def _each(world: int, members: int) -> int:
    """Number of processes that train one member."""
    return max(1, world // members)


def _listed(numbers: list[int]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, numbers[:-1])), *map(str, numbers[-1:])]))


def restarted() -> bool:
    """Whether torchrun has restarted these processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def started_by_torchrun() -> bool:
    """Whether torchrun, or a similar launcher, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def first_here() -> bool:
    """Whether this process is rank 0, by torchrun's environment variables."""
    return not started_by_torchrun() or os.environ["RANK"] == "0"
