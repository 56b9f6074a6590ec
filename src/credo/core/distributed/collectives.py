"""Collective operations on top of torch.distributed, with actionable errors when a process is lost."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from credo.core.errors import LostProcessError


class Communicator:
    """Collectives over one torch process group. All ranks must make the same calls in the same order.

    `calls` and `sent` count the reductions and the bytes this rank contributed to them.

    Args:
        group: torch's process group; None for a single process, whose collectives do nothing.
        device: Device of the tensors to exchange.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.calls = self.sent = 0
        self._broken: str | None = None

    def mean_(self, flat: Tensor) -> Callable[[], None]:
        """Start averaging `flat` over all ranks, in place; call the returned function to wait for completion."""
        if self.size == 1:
            return _nothing
        self._count(flat)
        with self._translated_errors():
            work = dist.all_reduce(flat, group=self.group, async_op=True)

        def finish() -> None:
            with self._translated_errors():
                work.wait()
            flat.mul_(1 / self.size)

        return finish

    def rounded_mean_(self, flat: Tensor, numbers: Tensor) -> Callable[[], None]:
        """Like `mean_`, but transfer `flat` in bfloat16: rounded when sent, and once more when the mean returns.

        A reduce-scatter with float32 accumulation followed by an all-gather: as many bytes as a bfloat16 all-reduce,
        which would round the partial sums at every rank. `numbers` are averaged in float64.
        """
        if self.size == 1:
            return _nothing
        pad = -len(flat) % self.size
        # As bytes: every backend supports uint8.
        parts = torch.cat([flat, flat.new_zeros(pad)]).to(torch.bfloat16).view(torch.uint8).view(self.size, -1)
        extra = numbers.double().view(torch.uint8).expand(self.size, -1)
        sent = torch.cat([parts, extra], 1)
        width = parts.shape[1]
        self.calls += 1
        self.sent += 2 * len(flat) + 8 * len(numbers)
        found = torch.empty_like(sent)
        with self._translated_errors():
            work = dist.all_to_all_single(found, sent, group=self.group, async_op=True)

        def finish() -> None:
            with self._translated_errors():
                work.wait()
                own = found[:, :width].contiguous().view(torch.bfloat16).to(torch.float32).mean(0).to(torch.bfloat16)
                whole = own.new_empty(self.size, len(own))
                dist.all_gather([*whole.view(torch.uint8)], own.view(torch.uint8), group=self.group)
            flat.copy_(whole.view(-1)[: len(flat)])
            numbers.copy_(found[:, width:].contiguous().view(torch.float64).mean(0))

        return finish

    def gather(self, flat: Tensor) -> Tensor:
        """Stack the vectors of all ranks: [size, entries]."""
        if self.size == 1:
            return flat.unsqueeze(0)
        self._count(flat)
        found = flat.new_empty(self.size, len(flat))
        with self._translated_errors():
            dist.all_gather([*found], flat.contiguous(), group=self.group)
        return found

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)], device=self.device)
        with self._translated_errors():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flags.item())

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Overwrite `tensor` with that of rank `source`."""
        if self.size > 1:
            with self._translated_errors():
                whole = tensor.contiguous()
                dist.broadcast(whole, group=self.group, group_src=source)
                tensor.copy_(whole)

    def share(self, thing: Any, source: int) -> Any:
        """The picklable object `thing` of rank `source`, on all ranks."""
        if self.size == 1:
            return thing
        on_cpu = self.device.type == "cpu"
        box: list[Any] = [None if self.rank != source else thing if on_cpu else _packed(thing)]
        with self._translated_errors():
            dist.broadcast_object_list(box, group=self.group, group_src=source, device=self.device)
        return box[0] if on_cpu else _unpacked(box[0])

    def split(self, lists: list[list[int]], **options: Any) -> Communicator:
        """A communicator over the list of ranks that contains this one; every rank must call it.

        Args:
            lists: Disjoint lists of ranks, the same on every rank.
            options: Passed to `torch.distributed.new_group`.
        """
        found = Communicator(None, self.device)
        for ranks in lists:
            if self.group is not None and len(ranks) > 1:
                with self._translated_errors():
                    whole = [dist.get_global_rank(self.group, rank) for rank in ranks]
                    group = dist.new_group(whole, **options)
                if self.rank in ranks:
                    found = Communicator(group, self.device)
        return found

    def leave(self, reason: str) -> None:
        """Destroy the group, so that peers waiting for this rank fail; later calls here raise with `reason`."""
        self._broken = reason
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def _count(self, flat: Tensor) -> None:
        self.calls += 1
        self.sent += flat.numel() * flat.element_size()

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        if self._broken is not None:
            raise LostProcessError(self._broken)
        try:
            yield
        except RuntimeError as error:  # gloo and nccl alike
            why = re.sub(r"^\[[^]]*\]\s*", "", str(error).strip()).partition("\n")[0].partition(". This is")[0]
            self._broken = (
                f"Process {self.rank} of {self.size}: another process was lost or timed out; this step was "
                f"not applied. {_what_now()} ({why})"
            )
            raise LostProcessError(self._broken) from error

    def __deepcopy__(self, memo: Any) -> Communicator:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # processes cannot be pickled: an unpickled posterior is not distributed


def _what_now() -> str:
    """What to do after losing a process, depending on the restarts torchrun has left."""
    most, done = (int(os.environ.get(f"TORCHELASTIC_{key}", "0")) for key in ("MAX_RESTARTS", "RESTART_COUNT"))
    if done < most:
        return f"torchrun restarts all processes from the last checkpoint (restart {done + 1} of {most})."
    if most:
        return f"torchrun has used up its {most} restarts: restart all processes from the last checkpoint."
    return "Restart all processes from the last checkpoint; torchrun --max-restarts=3 does so automatically."


def _packed(thing: Any) -> bytes:
    written = io.BytesIO()
    torch.save(thing, written)
    return written.getvalue()


def _unpacked(written: bytes) -> Any:
    """Load all tensors to the CPU; plain pickles would put them on the source rank's device."""
    return torch.load(io.BytesIO(written), map_location="cpu", weights_only=False)


def _nothing() -> None:
    pass
