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

from credo.core.distributed.process_group import Team
from credo.core.errors import CredoError, LostProcessError
from credo.core.posterior import Posterior
from credo.predict.result import P
from credo.predict.strategies import Strategy

SHARDS = ("draws", "data")


def sharing(posterior: Posterior, shard: str | None) -> tuple[Team | None, Team | None]:
    """The processes that divide the draws, and those that divide the batches; None where this one has them all."""
    team = posterior.team
    if shard is None or team is None or team.world == 1:
        return None, None
    return (team, None) if shard == "draws" else (None, team)


def is_ours(batch: int, team: Team | None) -> bool:
    """Whether this process predicts that batch."""
    return team is None or batch % team.world == team.rank


def gathered(parts: list[P], team: Team | None) -> list[P]:
    """The predictions of all batches in order, from processes that each have theirs."""
    if team is None:
        return parts
    found = [team.share(parts, source) for source in range(team.world)]
    count = sum(len(those) for those in found)
    return [found[batch % team.world][batch // team.world] for batch in range(count)]


@contextmanager
def together(team: Team | None) -> Iterator[None]:
    """What fails inside fails for all processes; nothing inside may exchange anything between them."""
    try:
        yield
    except LostProcessError:
        raise
    except Exception:
        if team is not None:
            team.agree(True)
        raise
    if team is not None and team.agree(False):
        raise CredoError("Another process failed at its part of the prediction and said why; this one stops with it.")


class Numbered(Strategy):
    """The draws of another strategy by their numbers, in blocks that the processes of `team` make in turn.

    All of them get the outputs of all draws, in order.
    """

    def __init__(self, inner: Strategy, posterior: Posterior, team: Team | None, *, seed: int, shared: bool) -> None:
        self.inner, self.posterior, self.team, self.seed, self.shared = inner, posterior, team, seed, shared
        self.block = inner.block
        self.period = posterior.whole_draws(1)  # draws of a mixture are of its parts in turn
        self.batch = self.done = 0

    def begin(self, batch: int) -> None:
        """The first draw for a batch; if shared, the same for all batches."""
        self.batch, self.done = (0 if self.shared else batch), 0

    def rounded(self, count: int) -> int:
        """So many draws, at least, that all processes have equally many."""
        whole = self.block * (1 if self.team is None else self.team.world)
        return -(-count // whole) * whole

    def outputs(self, x: Tensor, count: int) -> Tensor:
        """Outputs [count, batch, ...] of the next `count` draws, whoever made them."""
        end = self.done + count
        blocks = [(first, min(self.block, end - first)) for first in range(self.done, end, self.block)]
        self.done = end
        if self.team is None:
            return torch.cat([self._outputs(x, *block) for block in blocks])
        world = self.team.world
        with together(self.team):
            own = [self._outputs(x, *block).cpu() for block in blocks[self.team.rank :: world]]
        found = [self.team.share(own, source) for source in range(min(world, len(blocks)))]
        return torch.cat([found[i % world][i // world] for i in range(len(blocks))]).to(x.device)

    def agreed(self, rows: Tensor) -> Tensor:
        """Rows as the first process has them: rounding may differ between machines."""
        if self.team is None:
            return rows
        found: Tensor = self.team.share(rows.cpu())
        return found.to(rows.device)

    def _outputs(self, x: Tensor, first: int, count: int) -> Tensor:
        place = f"{self.seed} {self.batch} {first}"
        seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big")
        with self.posterior.seeded(seed):
            self.inner.restart(first % self.period)
            return self.inner.outputs(x, count)
