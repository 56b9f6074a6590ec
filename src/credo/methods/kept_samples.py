"""Weights that a sampler has kept: one stacked tensor, from which a posterior draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.network.batchnorm import tracking_layers
from credo.core.network.flat_layout import Layout

_MEAN, _VARIANCE = "running_mean", "running_var"


class KeptSamples(nn.Module):
    """Up to `capacity` states of a chain, evenly spaced, each with the running statistics that it was visited with.

    States are offered one after another. When the stack is full, every second sample is dropped and from then on half
    as many of those offered are kept, so that a chain of any length leaves between half of the capacity and all of it,
    evenly spaced over the whole chain.

    Args:
        model: The network, for the running statistics that it may have.
        layout: The parameters of a sample as one vector.
        capacity: The largest number of samples, at least 2 if there is to be any choice.
        device: Where they are.
    """

    nonnegative: ClassVar[tuple[str, ...]] = ("variances", "kept", "offered", "stride")
    weights: Tensor
    means: Tensor
    variances: Tensor
    kept: Tensor
    offered: Tensor
    stride: Tensor

    def __init__(self, model: nn.Module, layout: Layout, capacity: int, *, device: torch.device) -> None:
        super().__init__()
        self.layout, self.capacity = layout, capacity
        tracked = {id(layer._buffers[key]): key for layer in tracking_layers(model) for key in (_MEAN, _VARIANCE)}
        named = [(name, buffer, tracked.get(id(buffer))) for name, buffer in model.named_buffers()]
        self.statistics = {
            key: Layout({name: buffer for name, buffer, kind in named if kind == key}) for key in (_MEAN, _VARIANCE)
        }
        self.register_buffer("weights", torch.zeros(capacity, layout.size, dtype=layout.dtype, device=device))
        for name, found in zip(("means", "variances"), self.statistics.values(), strict=True):
            self.register_buffer(name, torch.zeros(capacity, found.size, dtype=found.dtype, device=device))
        for name, value in (("kept", 0), ("offered", 0), ("stride", 1)):
            self.register_buffer(name, torch.tensor(value))

    @property
    def statistic_names(self) -> list[str]:
        """Names of the buffers that a sample has."""
        return [name for layout in self.statistics.values() for name in layout.names]

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
        keep = self.is_next_kept
        self.offered.add_(1)
        if not keep:
            return
        if len(self) == self.capacity:
            self._thin_()
            if int(self.offered) % int(self.stride):
                return
        row = len(self)
        self.weights[row] = self.layout.flatten(tensors)
        if self.statistics[_MEAN].size:
            self.means[row] = self.statistics[_MEAN].flatten(tensors)
            self.variances[row] = self.statistics[_VARIANCE].flatten(tensors)
        self.kept.add_(1)

    def _thin_(self) -> None:
        """Keep the samples that an interval of twice the length would have kept: the second, the fourth, …"""
        if self.capacity == 1:
            self.kept.zero_()  # the newest replaces the only one
            return
        half = self.capacity // 2
        for stack in (self.weights, self.means, self.variances):
            stack[:half] = stack[1 : 2 * half : 2].clone()
        self.kept.fill_(half)
        self.stride.mul_(2)

    def at(self, index: int) -> dict[str, Tensor]:
        """A sample by parameter and buffer name, as copies."""
        found = self.layout.split(self.weights[index].clone())
        if self.statistics[_MEAN].size:
            found |= self.statistics[_MEAN].split(self.means[index].clone())
            found |= self.statistics[_VARIANCE].split(self.variances[index].clone())
        return found

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
        """Numbers in the stack."""
        return int(sum(stack.numel() for stack in (self.weights, self.means, self.variances)))

    def extra_repr(self) -> str:
        """Number and capacity."""
        return f"{len(self)} of {self.capacity} samples"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        kept = state_dict.get(f"{prefix}kept")
        if kept is not None and int(kept) > self.capacity:
            raise ValueError(f"The state holds {int(kept)} samples, and this posterior at most {self.capacity}.")
        super()._load_from_state_dict(state_dict, prefix, *args)
