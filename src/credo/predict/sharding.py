"""One prediction by several processes: who makes which draws or batches, and the whole of it for everybody.

Draws are functions of the seed, the batch and their number alone. So it does not matter who makes them, nor how many
processes there are: one alone gives the same prediction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from credo.core.distributed.process_group import ProcessGroup
from credo.core.errors import CredoError, LostProcessError
from credo.core.posterior import Posterior
from credo.predict.result import P
from credo.predict.strategies import Strategy

SHARDS = ("draws", "data")


def sharing(posterior: Posterior, shard: str | None) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """The processes that divide the draws, and those that divide the batches; None where this one has them all."""
    process_group = posterior.process_group
    if shard is None or process_group is None or process_group.world == 1:
        return None, None
    return (process_group, None) if shard == "draws" else (None, process_group)


def is_ours(batch: int, process_group: ProcessGroup | None) -> bool:
    """Whether this process predicts that batch."""
    return process_group is None or batch % process_group.world == process_group.rank


def gathered(parts: list[P], process_group: ProcessGroup | None) -> list[P]:
    """The predictions of all batches in order, from processes that each have theirs."""
    if process_group is None:
        return parts
    found = [process_group.share(parts, source) for source in range(process_group.world)]
    count = sum(len(those) for those in found)
    return [found[batch % process_group.world][batch // process_group.world] for batch in range(count)]


@contextmanager
def together(process_group: ProcessGroup | None) -> Iterator[None]:
    """What fails inside fails for all processes; nothing inside may exchange anything between them."""
    try:
        yield
    except LostProcessError:
        raise
    except Exception:
        if process_group is not None:
            process_group.agree(True)
        raise
    if process_group is not None and process_group.agree(False):
        raise CredoError("Another process failed at its part of the prediction and said why; this one stops with it.")


class Numbered(Strategy):
    """The draws of another strategy by their numbers, in blocks that the processes of `process_group` make in turn.

    All of them get the outputs of all draws, in order.
    """

    def __init__(
        self, inner: Strategy, posterior: Posterior, process_group: ProcessGroup | None, *, seed: int, shared: bool
    ) -> None:
        self.inner, self.posterior, self.process_group, self.seed, self.shared = (
            inner,
            posterior,
            process_group,
            seed,
            shared,
        )
        self.block = inner.block
        self.period = posterior.whole_draws(1)  # draws of a mixture are of its parts in turn
        self.batch = self.done = 0

    def begin(self, batch: int) -> None:
        """The first draw for a batch; if shared, the same for all batches."""
        self.batch, self.done = (0 if self.shared else batch), 0

    def rounded(self, count: int) -> int:
        """So many draws, at least, that all processes have equally many."""
        whole = self.block * (1 if self.process_group is None else self.process_group.world)
        return -(-count // whole) * whole

    def outputs(self, x: Tensor, count: int) -> Tensor:
        """Outputs [count, batch, ...] of the next `count` draws, whoever made them."""
        end = self.done + count
        blocks = [(first, min(self.block, end - first)) for first in range(self.done, end, self.block)]
        self.done = end
        if self.process_group is None:
            return torch.cat([self._outputs(x, *block) for block in blocks])
        world = self.process_group.world
        with together(self.process_group):
            own = [self._outputs(x, *block).cpu() for block in blocks[self.process_group.rank :: world]]
        found = [self.process_group.share(own, source) for source in range(min(world, len(blocks)))]
        return torch.cat([found[i % world][i // world] for i in range(len(blocks))]).to(x.device)

    def agreed(self, rows: Tensor) -> Tensor:
        """Rows as the first process has them: rounding may differ between machines."""
        if self.process_group is None:
            return rows
        found: Tensor = self.process_group.share(rows.cpu())
        return found.to(rows.device)

    def _outputs(self, x: Tensor, first: int, count: int) -> Tensor:
        place = f"{self.seed} {self.batch} {first}"
        seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big")
        with self.posterior.seeded(seed):
            self.inner.restart(first % self.period)
            return self.inner.outputs(x, count)
