"""The processes that train one posterior together: who sees which data and draws, and the means over all of them.

World = data groups × MC groups: rank = data_rank · mc_groups + mc_rank. Ranks of one `data_rank` see the same part of
the batch under different draws. Every rank has an equal share, so that the mean over ranks is the mean over batch and
draws (Osawa et al. 2019 train VOGN so).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from credo.core.distributed.batch_shard import WHOLE, Rows
from credo.core.distributed.collectives import Link
from credo.core.errors import LostProcessError, NonFiniteError
from credo.core.network.batchnorm import tracking_layers

if TYPE_CHECKING:
    from credo.core.posterior import Posterior

NOISES = ("own", "shared")
COMPRESSIONS = (None, "bfloat16")


@dataclass(frozen=True)
class Members:
    """How the members of an ensemble are spread: `own` are trained here, by the processes of `process_group`.

    `owners` gives for each member the rank that is asked for it.
    """

    process_group: ProcessGroup
    own: tuple[int, ...]
    owners: tuple[int, ...]


class ProcessGroup:
    """One of several processes that make every step together; made by `distribute`.

    A loader must give this rank part `data_rank` of `data_groups` of each batch (of a batch common to all members, for
    an ensemble). `reductions` and `bytes_sent` are those of the last step: how often numbers were averaged over
    processes, and the size of the vectors that this one gave (a ring sends 2·(world − 1)/world times as much).
    """

    def __init__(
        self,
        link: Link,
        peers: Link,
        *,
        mc_groups: int = 1,
        noise: str = "own",
        compress: str | None = None,
        members: Members | None = None,
    ) -> None:
        self.link, self.peers = link, peers
        self.rank, self.world = link.rank, link.size
        self.noise, self.compress, self.members = noise, compress, members
        self.mc_groups = mc_groups
        if members is None:
            self.data_rank, self.mc_rank = divmod(self.rank, mc_groups)
            self.data_groups = self.world // mc_groups
        else:
            inner = members.process_group
            self.data_rank, self.mc_rank, self.data_groups = inner.data_rank, inner.mc_rank, inner.data_groups
        self.reductions, self.bytes_sent = 0, 0
        self._before = (0, 0)
        self._doubted = False

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and speaks to the user."""
        return self.rank == 0

    @property
    def rows(self) -> Rows:
        """Which rows of noise for single examples are ours: all processes' together are those of one, if shared."""
        return Rows(self.data_rank, self.data_groups) if self.noise == "shared" else WHOLE

    def seed_for(self, *place: int) -> int:
        """A seed for a place (seed of the posterior, step, draw …), of the data rank's own unless noise is shared."""
        own = "" if self.noise == "shared" else f" {self.data_rank}"
        digest = hashlib.sha256((" ".join(map(str, place)) + own).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    # -- what all do together --------------------------------------------------------------------------------

    def average_(self, tensors: Sequence[Tensor], numbers: Sequence[float] = ()) -> list[float]:
        """Means over all processes in one exchange: of tensors in place, of numbers as what is returned."""
        before = self._traffic()
        found = self._start(self.link, tensors, numbers)()
        calls, sent = self._traffic()
        self._before = (self._before[0] + calls - before[0], self._before[1] + sent - before[1])  # not of a step
        return found

    def average_step_(
        self, tensors: Sequence[Tensor], losses: Sequence[float], parameters: Sequence[nn.Parameter] = ()
    ) -> list[float]:
        """The step's own exchange: means of tensors, losses, and gradients, each of which is None only if all are.

        There must be a loss; the first is not finite if any process was in `doubt`.
        """
        numbers = list(losses)
        if self._doubted:
            numbers[0], self._doubted = math.nan, False
        own = [p.grad for p in parameters]
        gradients, found = self._average_gradients(self.link, parameters, own, numbers, tensors)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._close_step()
        return found

    def average_slopes(self, like: Sequence[Tensor], slopes: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Means of derivatives over the processes that have the same draw, which is this one alone without sharing."""
        if self.noise != "shared":
            return list(slopes)
        return self._average_gradients(self.peers, like, slopes, [], [])[0]

    def agree(self, flag: bool) -> bool:
        """Whether it is true for any process."""
        return self.link.any(flag)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Tensors as one process has them, in place."""
        for tensor in tensors:
            self.link.broadcast_(tensor.detach(), source)

    def share(self, thing: Any, source: int = 0) -> Any:
        """Anything that can be pickled, as one process has it."""
        return self.link.share(thing, source)

    def barrier(self) -> None:
        """Wait for all."""
        self.agree(False)

    # -- errors that all have -----------------------------------------------------------------------------------

    @property
    def defers(self) -> bool:
        """Whether a loss that is not finite waits for the step's exchange, which then makes it an error of all."""
        return self.world > 1

    def doubt(self, loss: float) -> None:
        """Remember a loss that is not finite until the step's exchange."""
        self._doubted = self._doubted or not math.isfinite(loss)

    def failed(self, error: BaseException) -> None:
        """A step of ours ended in an error; unless all have it, leave, so that the others do not wait in vain."""
        if self.world > 1 and not isinstance(error, NonFiniteError | LostProcessError):
            self.close(
                f"Process {self.rank} left the process group when a step of its own failed "
                f"({type(error).__name__}: {error}). "
                "Start all processes again from the last checkpoint."
            )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A step: `failed` is told of what ends it."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    def close(self, reason: str = "This process group was closed.") -> None:
        """No exchange any more."""
        if self.members is not None:
            self.members.process_group.close(reason)
        for link in (self.peers, self.link):
            if link.group is not None:
                link.leave(reason)

    # -- what only some know ------------------------------------------------------------------------------------

    def settle_(self, posterior: Posterior) -> None:
        """Make the same on all processes what may differ: running statistics, and who has trained which member.

        Running statistics of normalisation layers are averaged; other buffers of the network are as the first process
        has them. Before evaluation and checkpoints; all processes must call it.
        """
        if self.members is None:
            self.average_buffers_(posterior)
            self.share_buffers_(posterior.model)
            return
        for index in self.members.own:
            self.members.process_group.average_buffers_(posterior.parts[index])
        for index, (part, owner) in enumerate(zip(posterior.parts, self.members.owners, strict=True)):
            state = self.share(part.state_dict() if self.rank == owner else None, owner)
            if index not in self.members.own:
                part.load_state_dict(state)
            self.share_buffers_(part.model, owner)

    @torch.no_grad()
    def average_buffers_(self, model: nn.Module) -> None:
        """Running statistics become means over the data groups; of the MC groups only the first counts as data."""
        buffers = [b for layer in tracking_layers(model) for b in layer._buffers.values() if b is not None]
        if self.world == 1 or not buffers:
            return
        weight = float(self.mc_groups if self.mc_rank == 0 else 0)
        wide = [b.double() * weight if weight else torch.zeros_like(b, dtype=torch.double) for b in buffers]
        self.average_(wide)
        for buffer, mean in zip(buffers, wide, strict=True):
            buffer.copy_(mean if buffer.is_floating_point() else mean.round())

    @torch.no_grad()
    def share_buffers_(self, model: nn.Module, source: int = 0) -> None:
        """All buffers but running statistics become those of one process, also if they are not saved."""
        known = {id(b) for layer in tracking_layers(model) for b in layer._buffers.values()}
        own = {name: b for name, b in model.named_buffers() if id(b) not in known}
        if self.world == 1 or not self.agree(bool(own)):
            return
        found = self.share(own if self.rank == source else None, source)
        for name, buffer in own.items():
            if name in found and not torch.equal(buffer.cpu(), found[name].cpu()):
                buffer.resize_(found[name].shape).copy_(found[name])

    # -- inner --------------------------------------------------------------------------------------------------

    def _start(
        self, link: Link, tensors: Sequence[Tensor], numbers: Sequence[float], compress: str | None = None
    ) -> Callable[[], list[float]]:
        """Begin an exchange; what it returns waits for its end. Between the two there is time for something else."""
        if link.size == 1:
            return lambda: list(numbers)
        dtype = torch.float32 if tensors else torch.float64
        for tensor in tensors:
            dtype = torch.promote_types(dtype, tensor.dtype)
        values = torch.tensor(numbers, dtype=dtype if compress is None else torch.float64, device=link.device)
        pieces = [t.detach().reshape(-1).to(dtype) for t in tensors]
        sizes = [len(piece) for piece in pieces]
        if compress is None:
            flat = torch.cat([*pieces, values])
            finish = link.mean_(flat)
            values = flat[len(flat) - len(numbers) :]
        else:
            flat = torch.cat(pieces) if pieces else values[:0]
            finish = link.rounded_mean_(flat, values)

        @torch.no_grad()
        def finished() -> list[float]:
            finish()
            for tensor, piece in zip(tensors, flat[: sum(sizes)].split(sizes) if sizes else (), strict=True):
                tensor.copy_(piece.view(tensor.shape))
            return [float(v) for v in values.tolist()]

        return finished

    def _average_gradients(
        self,
        link: Link,
        like: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        numbers: Sequence[float],
        tensors: Sequence[Tensor],
    ) -> tuple[list[Tensor | None], list[float]]:
        """Gradients that may be None, as zeros and a number each that says so."""
        if link.size == 1:
            return list(gradients), list(numbers)
        whole = [torch.zeros_like(t) if g is None else g for t, g in zip(like, gradients, strict=True)]
        there = [float(g is not None) for g in gradients]
        found = self._start(link, [*tensors, *whole], [*numbers, *there], self.compress)()
        cut = len(numbers)
        return [g if flag else None for g, flag in zip(whole, found[cut:], strict=True)], found[:cut]

    def _traffic(self) -> tuple[int, int]:
        links = (self.link,) if self.peers is self.link else (self.link, self.peers)
        return sum(link.calls for link in links), sum(link.sent for link in links)

    def _close_step(self) -> None:
        total = self._traffic()
        self.reductions, self.bytes_sent = total[0] - self._before[0], total[1] - self._before[1]
        self._before = total

    def __deepcopy__(self, memo: Any) -> ProcessGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobody, ()  # processes cannot be pickled: what is loaded is alone


def _nobody() -> None:
    return None
