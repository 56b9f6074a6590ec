"""The [distributed] section of an experiment: how the processes that torchrun starts share the training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from credo.core.distribute import BATCHNORMS
from credo.core.errors import unknown
from credo.core.team import NOISES
from credo.experiments.checks import check_kinds
from credo.experiments.defaults import NONE


@dataclass(frozen=True)
class Distributed:
    """Options of `credo.distribute`. A single process that has this section makes the draws of a team of one.

    Another number of processes can go on with a run, also with other `mc_groups`; the rest are settings of the run.
    """

    mc_groups: int = 1
    noise: str = "own"
    compress: str | None = None
    batchnorm: str = "local"
    timeout: float = 300.0


def make_distributed(table: Mapping[str, Any]) -> Distributed:
    """The section with every key checked."""
    known = asdict(Distributed())
    for key in table:
        if key not in known:
            raise ValueError(unknown("option of distributed", key, known))
    table = {key: None if value == NONE else value for key, value in table.items()}
    given = {key: value for key, value in table.items() if value is not None}
    check_kinds("distributed", given, known)
    for key, choices in (("noise", NOISES), ("batchnorm", BATCHNORMS)):
        if given.get(key, choices[0]) not in choices:
            raise ValueError(unknown(f"distributed.{key}", str(given[key]), choices))
    if given.get("compress", "bfloat16") != "bfloat16":
        raise ValueError(f"distributed.compress={given['compress']!r}: possible are 'bfloat16' and 'none'.")
    return Distributed(**given)


def started_by_torchrun() -> bool:
    """Whether this process is one of those that torchrun (or a like launcher) started together, be it alone."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def first_here() -> bool:
    """Whether this process is the one that speaks, judged by torchrun's environment alone."""
    return not started_by_torchrun() or os.environ["RANK"] == "0"
