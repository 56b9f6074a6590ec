"""Divide one prediction among processes, which all get the whole of it.

Draws are functions of seed, batch and number alone, so it does not matter which process makes them, nor how many there
are: one process alone gives the same prediction.
"""

from __future__ import annotations

import hashlib
from types import TracebackType

import torch
from torch import Tensor

from credo.core.distributed.process_group import ProcessGroup
from credo.core.errors import CredoError, LostProcessError
from credo.core.network.inputs import AnyInputs
from credo.core.posterior import Posterior
from credo.predict.draw_loop import Loop
from credo.predict.result import P

SHARDS = ("draws", "data")


class FailTogether:
    """While open, an error in one process raises in all of them; nothing inside may exchange data between processes.

    Args:
        process_group: The processes; None for this one alone.
    """

    def __init__(self, process_group: ProcessGroup | None) -> None:
        alone = process_group is None or process_group.world == 1
        self.process_group = None if alone else process_group

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Exchange whether all is well."""
        if self.process_group is None or isinstance(error, LostProcessError):
            return
        if error is not None and not isinstance(error, Exception):  # interrupted: the others are as well
            return
        if self.process_group.agree(error is not None) and error is None:
            raise CredoError(
                "Another process failed at its part of the prediction and said why; this one stops with it."
            )


class DataShard(FailTogether):
    """The batches that this process predicts: every `world`-th one."""

    def is_ours(self, batch: int) -> bool:
        """Whether this process predicts that batch."""
        group = self.process_group
        return group is None or batch % group.world == group.rank

    def gathered(self, parts: list[P], rows: set[int]) -> tuple[list[P], set[int]]:
        """The predictions of all batches, in order, and the union of all processes' `rows`.

        Args:
            parts: Predictions of this process's batches.
            rows: Row numbers that this process has found.
        """
        group = self.process_group
        if group is None:
            return parts, rows
        found = [group.share((parts, sorted(rows)), source) for source in range(group.world)]
        count = sum(len(those) for those, _ in found)
        ordered = [found[batch % group.world][0][batch // group.world] for batch in range(count)]
        return ordered, {row for _, those in found for row in those}


class NumberedDraws:
    """The draws of a loop by their numbers, in blocks that the processes make in turn; all get all outputs, in order.

    Args:
        loop: Makes the draws of one block, from a generator seeded for it.
        posterior: The snapshot that the loop draws from.
        process_group: The processes that divide the draws; None if this one makes them all.
        seed: The prediction's seed.
        shared: Whether every batch has the same draws.
    """

    def __init__(
        self, loop: Loop, posterior: Posterior, process_group: ProcessGroup | None, *, seed: int, shared: bool
    ) -> None:
        self.loop, self.posterior, self.seed, self.shared = loop, posterior, seed, shared
        self.failing = FailTogether(process_group)
        self.process_group = self.failing.process_group
        self.block = loop.block
        self.period = posterior.whole_draws(1)  # draws of a mixture are of its members in turn
        self.batch = self.done = 0

    def begin(self, batch: int) -> None:
        """Start with the first draw of a batch; if shared, the same for all batches."""
        self.batch, self.done = (0 if self.shared else batch), 0

    def rounded(self, count: int) -> int:
        """Round up to a number of draws of which all processes make equally many."""
        whole = self.block * (1 if self.process_group is None else self.process_group.world)
        return -(-count // whole) * whole

    def outputs(self, x: AnyInputs, count: int) -> Tensor:
        """Outputs [count, batch, …] of the next `count` draws, whichever process makes them."""
        end = self.done + count
        blocks = [(first, min(self.block, end - first)) for first in range(self.done, end, self.block)]
        self.done = end
        if self.process_group is None:
            return torch.cat([self._outputs(x, *block) for block in blocks])
        world = self.process_group.world
        with self.failing:
            own = [self._outputs(x, *block).cpu() for block in blocks[self.process_group.rank :: world]]
        found = [self.process_group.share(own, source) for source in range(min(world, len(blocks)))]
        return torch.cat([found[i % world][i // world] for i in range(len(blocks))]).to(self.posterior.device)

    def agreed(self, rows: Tensor) -> Tensor:
        """Rows as the first process has them: rounding may differ between machines."""
        if self.process_group is None:
            return rows
        found: Tensor = self.process_group.share(rows.cpu())
        return found.to(rows.device)

    def _outputs(self, x: AnyInputs, first: int, count: int) -> Tensor:
        name = f"{self.seed} {self.batch} {first}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        with self.posterior.seeded(seed):
            self.loop.begin(skip=first % self.period)
            return self.loop.outputs(x, count)
