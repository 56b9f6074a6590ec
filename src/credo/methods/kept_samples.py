"""Weights that a sampler has kept, in memory or in files: what its posterior draws from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.network.batchnorm import tracking_layers
from credo.core.network.flat_layout import Layout
from credo.methods.sample_files import DIGEST, SampleFiles

# Running statistics, by the name of their stack.
_STATISTICS = {"means": "running_mean", "variances": "running_var"}


class KeptSamples(nn.Module):
    """Up to `capacity` states of a chain, evenly spaced, each with the running statistics that it was visited with.

    States are offered one after another. When there is no room, every second sample is dropped and from then on half
    as many of those offered are kept, so that a chain of any length leaves between half of the capacity and all of it,
    evenly spaced over the whole chain. A sample is one row: of stacks of flat vectors, or with a folder of the digests
    of files, which hold the tensors themselves.

    Args:
        model: The network, for the running statistics that it may have.
        layout: The parameters of a sample as one vector.
        capacity: The largest number of samples, at least 2 if there is to be any choice.
        device: Where they are.
        folder: Where each sample is written to a file; None: they are in memory.
    """

    nonnegative: ClassVar[tuple[str, ...]] = ("variances", "kept", "offered", "stride")
    weights: Tensor
    means: Tensor
    variances: Tensor
    digests: Tensor
    kept: Tensor
    offered: Tensor
    stride: Tensor

    def __init__(
        self, model: nn.Module, layout: Layout, capacity: int, *, device: torch.device, folder: Path | None = None
    ) -> None:
        super().__init__()
        self.capacity = capacity
        tracked = {id(layer._buffers[key]): key for layer in tracking_layers(model) for key in _STATISTICS.values()}
        named = [(name, buffer, tracked.get(id(buffer))) for name, buffer in model.named_buffers()]
        self.layouts = {"weights": layout}
        for stack, key in _STATISTICS.items():
            self.layouts[stack] = Layout({name: buffer for name, buffer, kind in named if kind == key})
        self.files = None if folder is None else SampleFiles(folder, self.layouts)
        if self.files is None:
            for name, found in self.layouts.items():
                self.register_buffer(name, torch.zeros(capacity, found.size, dtype=found.dtype, device=device))
        else:
            self.register_buffer("digests", torch.zeros(capacity, DIGEST, dtype=torch.uint8, device=device))
        for name, value in (("kept", 0), ("offered", 0), ("stride", 1)):
            self.register_buffer(name, torch.tensor(value))

    @property
    def statistic_names(self) -> list[str]:
        """Names of the buffers that a sample has."""
        return [name for stack in _STATISTICS for name in self.layouts[stack].names]

    def __len__(self) -> int:
        return int(self.kept)

    def forget_(self) -> None:
        """Start again without any sample."""
        self.kept.zero_()
        self.offered.zero_()
        self.stride.fill_(1)

    @property
    def is_next_kept(self) -> bool:
        """Whether the next state that is offered will be kept."""
        return (int(self.offered) + 1) % int(self.stride) == 0

    @torch.no_grad()
    def offer_(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep a state of the chain if it is one of those to keep.

        Args:
            tensors: Parameters and buffers of the network by name.
        """
        thins = self.is_next_kept and len(self) == self.capacity
        stride = int(self.stride) * (2 if thins and self.capacity > 1 else 1)
        keep = (int(self.offered) + 1) % stride == 0
        row = self._row_of(tensors) if keep else {}  # may fail, on a full disk, before anything has changed
        self.offered.add_(1)
        if thins:
            self._thin_()
        if keep:
            for name, value in row.items():
                getattr(self, name)[len(self)] = value
            self.kept.add_(1)

    def _row_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows of a sample by stack; its file is written, if there are files."""
        vectors = {name: layout.flatten(tensors) for name, layout in self.layouts.items() if layout.names}
        return vectors if self.files is None else {"digests": self.files.write(vectors)}

    def _thin_(self) -> None:
        """Keep the samples that an interval of twice the length would have kept: the second, the fourth, …"""
        if self.capacity == 1:
            self.kept.zero_()  # the newest replaces the only one
            return
        half = self.capacity // 2
        for stack in (self.digests,) if self.files is not None else (self.weights, self.means, self.variances):
            stack[:half] = stack[1 : 2 * half : 2].clone()
        self.kept.fill_(half)
        self.stride.mul_(2)

    def at(self, index: int) -> dict[str, Tensor]:
        """A sample by parameter and buffer name, as copies; read from its file, if it is in one.

        Args:
            index: Its number, in the order of the chain.
        """
        if self.files is not None:
            vectors = self.files.read(self.digests[index])
        else:
            vectors = {name: getattr(self, name)[index].clone() for name in self.layouts}
        return {n: t for name, vector in vectors.items() for n, t in self.layouts[name].split(vector).items()}

    def indices(self, count: int, generator: torch.Generator) -> list[int]:
        """`count` samples: evenly spaced ones if there are more of them, otherwise all in turn; none if there is none.

        Args:
            count: Number of samples.
            generator: Chooses the first, each with the same probability.
        """
        total = len(self)
        if not total:
            return []
        first = int(torch.randint(total, (), generator=generator, device=generator.device))
        return [(first + (index * total // count if count < total else index)) % total for index in range(count)]

    def stored_numbers(self) -> int:
        """Numbers in samples, if there are as many as there is room for."""
        return self.capacity * sum(layout.size for layout in self.layouts.values())

    def paths(self) -> list[Path]:
        """The files of the samples, in the order of the chain; none, if they are in memory."""
        return [] if self.files is None else [self.files.path(digest) for digest in self.digests[: len(self)]]

    def extra_repr(self) -> str:
        """Number and capacity."""
        return f"{len(self)} of {self.capacity} samples" + ("" if self.files is None else f" in {self.files.folder}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        kept, digests = state_dict.get(f"{prefix}kept"), state_dict.get(f"{prefix}digests")
        if kept is not None:
            if int(kept) > self.capacity:
                raise ValueError(f"The state holds {int(kept)} samples, and this posterior at most {self.capacity}.")
            if (digests is None) != (self.files is None):
                there, way = ("memory", "without") if digests is None else ("files", "with")
                raise ValueError(f"The state's samples were in {there}: load it into a posterior {way} samples_dir=.")
            if self.files is not None and digests is not None:
                self.files.require(digests[: int(kept)])
        super()._load_from_state_dict(state_dict, prefix, *args)
