"""Processes that exchange tensors: what Credo uses of torch.distributed, with errors that say what to do."""

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


class Link:
    """Some processes, of which this is number `rank`; one alone (`group` None) exchanges nothing.

    `calls` and `sent` count exchanges of numbers and the bytes that this process gave to them. Every process must make
    the same exchanges in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.calls = self.sent = 0
        self._broken: str | None = None

    def mean_(self, flat: Tensor) -> Callable[[], None]:
        """Begin to replace a vector by its mean over all processes; done when what it returns has been called."""
        if self.size == 1:
            return _nothing
        self._count(flat)
        with self._watched():
            work = dist.all_reduce(flat, group=self.group, async_op=True)

        def finish() -> None:
            with self._watched():
                work.wait()
            flat.mul_(1 / self.size)

        return finish

    def rounded_mean_(self, flat: Tensor, numbers: Tensor) -> Callable[[], None]:
        """The same with the vector rounded to bfloat16 on the way, twice: as it is sent, and as the mean comes back.

        Each process adds up one part, in single precision, and sends it to all: as many bytes as an all-reduce of
        bfloat16, whose sums would be rounded once more with each process. `numbers` are not rounded.
        """
        if self.size == 1:
            return _nothing
        pad = -len(flat) % self.size
        # As bytes, which every backend moves.
        parts = torch.cat([flat, flat.new_zeros(pad)]).to(torch.bfloat16).view(torch.uint8).view(self.size, -1)
        extra = numbers.double().view(torch.uint8).expand(self.size, -1)
        sent = torch.cat([parts, extra], 1)
        width = parts.shape[1]
        self.calls += 1
        self.sent += 2 * len(flat) + 8 * len(numbers)
        found = torch.empty_like(sent)
        with self._watched():
            work = dist.all_to_all_single(found, sent, group=self.group, async_op=True)

        def finish() -> None:
            with self._watched():
                work.wait()
                own = found[:, :width].contiguous().view(torch.bfloat16).to(torch.float32).mean(0).to(torch.bfloat16)
                whole = own.new_empty(self.size, len(own))
                dist.all_gather([*whole.view(torch.uint8)], own.view(torch.uint8), group=self.group)
            flat.copy_(whole.view(-1)[: len(flat)])
            numbers.copy_(found[:, width:].contiguous().view(torch.float64).mean(0))

        return finish

    def gather(self, flat: Tensor) -> Tensor:
        """[size, entries]: the vectors of all processes."""
        if self.size == 1:
            return flat.unsqueeze(0)
        self._count(flat)
        found = flat.new_empty(self.size, len(flat))
        with self._watched():
            dist.all_gather([*found], flat.contiguous(), group=self.group)
        return found

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        if self.size == 1:
            return flag
        told = torch.tensor([int(flag)], device=self.device)
        with self._watched():
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.group)
        return bool(told.item())

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """The tensor of process `source`, in place."""
        if self.size > 1:
            with self._watched():
                whole = tensor.contiguous()
                dist.broadcast(whole, group=self.group, group_src=source)
                tensor.copy_(whole)

    def share(self, thing: Any, source: int) -> Any:
        """Anything that can be pickled, as process `source` has it."""
        if self.size == 1:
            return thing
        on_cpu = self.device.type == "cpu"
        box: list[Any] = [None if self.rank != source else thing if on_cpu else _packed(thing)]
        with self._watched():
            dist.broadcast_object_list(box, group=self.group, group_src=source, device=self.device)
        return box[0] if on_cpu else _unpacked(box[0])

    def part(self, lists: list[list[int]], **options: Any) -> Link:
        """The link among those of one of these lists that has this process; all make it together."""
        found = Link(None, self.device)
        for ranks in lists:
            if self.group is not None and len(ranks) > 1:
                with self._watched():
                    whole = [dist.get_global_rank(self.group, rank) for rank in ranks]
                    group = dist.new_group(whole, **options)
                if self.rank in ranks:
                    found = Link(group, self.device)
        return found

    def leave(self, reason: str) -> None:
        """No exchange any more; what others wait for does not come, so that they notice."""
        self._broken = reason
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def _count(self, flat: Tensor) -> None:
        self.calls += 1
        self.sent += flat.numel() * flat.element_size()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        if self._broken is not None:
            raise LostProcessError(self._broken)
        try:
            yield
        except RuntimeError as error:  # of gloo and nccl alike
            why = re.sub(r"^\[[^]]*\]\s*", "", str(error).strip()).partition("\n")[0].partition(". This is")[0]
            self._broken = (
                f"Process {self.rank} of {self.size}: another process was lost or did not answer in time, and this "
                f"step was not made. {_what_now()} ({why})"
            )
            raise LostProcessError(self._broken) from error

    def __deepcopy__(self, memo: Any) -> Link:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # processes cannot be pickled: what is loaded is alone


def _what_now() -> str:
    """What becomes of a process group that lost a process, by what torchrun tells its workers."""
    most, done = (int(os.environ.get(f"TORCHELASTIC_{key}", "0")) for key in ("MAX_RESTARTS", "RESTART_COUNT"))
    if done < most:
        return f"torchrun starts all of them again, from the last checkpoint (restart {done + 1} of {most})."
    if most:
        return f"torchrun has used up its restarts ({most}): start all of them again from the last checkpoint."
    return "Start all of them again from the last checkpoint; torchrun --max-restarts=3 does it by itself."


def _packed(thing: Any) -> bytes:
    written = io.BytesIO()
    torch.save(thing, written)
    return written.getvalue()


def _unpacked(written: bytes) -> Any:
    """With all tensors, however deep inside, on the CPU: plain pickles would bring them to the source's device."""
    return torch.load(io.BytesIO(written), map_location="cpu", weights_only=False)


def _nothing() -> None:
    pass
