"""The process group of a distributed posterior: the layout of data shards and draws, and averages over ranks.

World = data groups × MC groups: rank = data_rank · mc_groups + mc_rank. Ranks with the same `data_rank` see the same
shard of the batch under different draws. All shards have equal size, so the mean over ranks is the mean over batch and
draws (as in Osawa et al. 2019 for VOGN).
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
from credo.core.distributed.collectives import Communicator
from credo.core.errors import LostProcessError, NonFiniteError
from credo.core.network.batchnorm import tracking_layers

if TYPE_CHECKING:
    from credo.core.posterior import Posterior

NOISES = ("own", "shared")
COMPRESSIONS = (None, "bfloat16")


@dataclass(frozen=True)
class Members:
    """How the members of an ensemble are assigned to ranks.

    Args:
        process_group: The ranks that train the same members as this one.
        own: Indices of the members trained here.
        owners: For each member, the rank that provides its state.
    """

    process_group: ProcessGroup
    own: tuple[int, ...]
    owners: tuple[int, ...]


class ProcessGroup:
    """The processes that train one posterior together, as seen from this rank; created by `credo.distribute`.

    The loader must yield shard `data_rank` of `data_groups` of each batch (for an ensemble: of the batch shared by all
    members). After a step, `reductions` counts its all-reduces and `bytes_sent` the bytes this rank contributed (a ring
    all-reduce transfers 2·(world − 1)/world times as much).

    Args:
        comm: Communicator over all ranks.
        peers: Communicator over the ranks that have the same draws.
        mc_groups: Number of ranks that share a data shard under different draws.
        noise: `"own"` or `"shared"`: whether each data shard has its own draws.
        compress: None, or `"bfloat16"` to halve the bytes sent.
        members: Assignment of ensemble members to ranks; None unless the posterior is an ensemble.
    """

    def __init__(
        self,
        comm: Communicator,
        peers: Communicator,
        *,
        mc_groups: int = 1,
        noise: str = "own",
        compress: str | None = None,
        members: Members | None = None,
    ) -> None:
        self.comm, self.peers = comm, peers
        self.rank, self.world = comm.rank, comm.size
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
        self._loss_is_bad = False

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and logs."""
        return self.rank == 0

    @property
    def rows(self) -> Rows:
        """This rank's rows of per-example noise; with shared noise, a slice of the global batch's."""
        return Rows(self.data_rank, self.data_groups) if self.noise == "shared" else WHOLE

    def seed_for(self, *position: int) -> int:
        """Hash a position (posterior's seed, step, draw, …) to a seed; specific to the data shard unless shared."""
        own = "" if self.noise == "shared" else f" {self.data_rank}"
        digest = hashlib.sha256((" ".join(map(str, position)) + own).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def reseed(self, posterior: Posterior, *position: int) -> None:
        """Reseed a posterior from (its seed, its step, position, data shard).

        So results do not depend on which rank runs what, also after a restart with more or fewer processes.
        """
        posterior.generator.manual_seed(self.seed_for(posterior.seed, posterior.steps, *position))

    def reseed_alike(self, posterior: Posterior) -> None:
        """Reseed a posterior from (its seed, its step), on all ranks alike, for noise in an update that all make."""
        digest = hashlib.sha256(f"update {posterior.seed} {posterior.steps}".encode()).digest()
        posterior.generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def begin_pass(self, posterior: Posterior, count: int, draws: int = 1) -> None:
        """Reseed for the pass that comes after `count` others of a step; after `draws`, it is for more data."""
        part, index = divmod(count, draws)
        self.reseed(posterior, self.draw_number(index, draws), part)

    def draw_number(self, index: int, draws: int = 1) -> int:
        """The number of one of our `draws` among those of all processes that see the same data."""
        return self.mc_rank * draws + index

    # -- collectives ------------------------------------------------------------------------------------------

    def average_(self, tensors: Sequence[Tensor], numbers: Sequence[float] = ()) -> list[float]:
        """Average over all ranks in one reduction: `tensors` in place, `numbers` as the return value."""
        before = self._traffic()
        found = self._start(self.comm, tensors, numbers)()
        calls, sent = self._traffic()
        self._before = (self._before[0] + calls - before[0], self._before[1] + sent - before[1])  # not part of a step
        return found

    def average_step_(
        self, tensors: Sequence[Tensor], losses: Sequence[float], parameters: Sequence[nn.Parameter] = ()
    ) -> list[float]:
        """The one reduction of a training step: average everything over all ranks.

        Args:
            tensors: Averaged in place.
            losses: At least one; the averages are returned. The first becomes NaN if any rank called
                `record_nonfinite`.
            parameters: Their `.grad` is averaged; it stays None only if it is None on every rank.
        """
        numbers = list(losses)
        if self._loss_is_bad:
            numbers[0], self._loss_is_bad = math.nan, False
        own = [p.grad for p in parameters]
        gradients, found = self._average_optional(self.comm, parameters, own, numbers, tensors)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._close_step()
        return found

    def average_gradients(self, like: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Average gradients over the ranks that have the same draw: only this one unless noise is shared.

        Args:
            like: Tensors with the shapes of the gradients.
            gradients: One for each, None where there is none; averages are None only if all are.
        """
        if self.noise != "shared":
            return list(gradients)
        return self._average_optional(self.peers, like, gradients, [], [])[0]

    def agree(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank. A collective call: every rank must make it."""
        return self.comm.any(flag)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrite `tensors` with those of rank `source`."""
        for tensor in tensors:
            self.comm.broadcast_(tensor.detach(), source)

    def share(self, thing: Any, source: int = 0) -> Any:
        """The picklable object `thing` of rank `source`, on all ranks."""
        return self.comm.share(thing, source)

    # -- errors -----------------------------------------------------------------------------------------------

    @property
    def defers(self) -> bool:
        """Whether a non-finite loss is raised at the step's reduction, on all ranks, instead of at once."""
        return self.world > 1

    def record_nonfinite(self, loss: float) -> None:
        """Record a non-finite loss; it is raised on all ranks at the next step reduction."""
        self._loss_is_bad = self._loss_is_bad or not math.isfinite(loss)

    def failed(self, error: BaseException) -> None:
        """Handle an exception in a step: unless every rank has it, leave the group so that the others do not hang."""
        if self.world > 1 and not isinstance(error, NonFiniteError | LostProcessError):
            self.close(
                f"Process {self.rank} left the process group because its step failed "
                f"({type(error).__name__}: {error}). Restart all processes from the last checkpoint."
            )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager for one step; on an exception, notify the other ranks."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    def close(self, reason: str = "This process group was closed.") -> None:
        """Leave the group; later collectives raise `LostProcessError` with `reason`."""
        if self.members is not None:
            self.members.process_group.close(reason)
        for comm in (self.peers, self.comm):
            if comm.group is not None:
                comm.leave(reason)

    # -- synchronising state ------------------------------------------------------------------------------------

    def settle_(self, posterior: Posterior) -> None:
        """Synchronise the state that differs between ranks; every rank must call it before evaluation and checkpoints.

        Running statistics of normalisation layers are averaged, other buffers of the network are taken from rank 0, and
        ensemble members from the ranks that trained them.
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
        """Average running statistics over the data groups (ranks of one data group have seen the same data)."""
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
        """Copy all buffers except running statistics from rank `source`, including non-persistent ones."""
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
        self, comm: Communicator, tensors: Sequence[Tensor], numbers: Sequence[float], compress: str | None = None
    ) -> Callable[[], list[float]]:
        """Start an asynchronous average; the returned function waits for it."""
        if comm.size == 1:
            return lambda: list(numbers)
        dtype = torch.float32 if tensors else torch.float64
        for tensor in tensors:
            dtype = torch.promote_types(dtype, tensor.dtype)
        values = torch.tensor(numbers, dtype=dtype if compress is None else torch.float64, device=comm.device)
        pieces = [t.detach().reshape(-1).to(dtype) for t in tensors]
        sizes = [len(piece) for piece in pieces]
        if compress is None:
            flat = torch.cat([*pieces, values])
            finish = comm.mean_(flat)
            values = flat[len(flat) - len(numbers) :]
        else:
            flat = torch.cat(pieces) if pieces else values[:0]
            finish = comm.rounded_mean_(flat, values)

        @torch.no_grad()
        def finished() -> list[float]:
            finish()
            for tensor, piece in zip(tensors, flat[: sum(sizes)].split(sizes) if sizes else (), strict=True):
                tensor.copy_(piece.view(tensor.shape))
            return [float(v) for v in values.tolist()]

        return finished

    def _average_optional(
        self,
        comm: Communicator,
        like: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        numbers: Sequence[float],
        tensors: Sequence[Tensor],
    ) -> tuple[list[Tensor | None], list[float]]:
        """Average gradients that may be None: sent as zeros, each with a flag."""
        if comm.size == 1:
            return list(gradients), list(numbers)
        whole = [torch.zeros_like(t) if g is None else g for t, g in zip(like, gradients, strict=True)]
        there = [float(g is not None) for g in gradients]
        found = self._start(comm, [*tensors, *whole], [*numbers, *there], self.compress)()
        cut = len(numbers)
        return [g if flag else None for g, flag in zip(whole, found[cut:], strict=True)], found[:cut]

    def _traffic(self) -> tuple[int, int]:
        comms = (self.comm,) if self.peers is self.comm else (self.comm, self.peers)
        return sum(comm.calls for comm in comms), sum(comm.sent for comm in comms)

    def _close_step(self) -> None:
        total = self._traffic()
        self.reductions, self.bytes_sent = total[0] - self._before[0], total[1] - self._before[1]
        self._before = total

    def __deepcopy__(self, memo: Any) -> ProcessGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobody, ()  # processes cannot be pickled: an unpickled posterior is not distributed


def _nobody() -> None:
    return None
