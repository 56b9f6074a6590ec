"""Running statistics of BatchNorm for a mean network and for a fixed number of draws, each with its own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.distributed.process_group import ProcessGroup
from credo.core.network.batchnorm import statistics_of, tracking_layers
from credo.core.network.flat_layout import Layout
from credo.core.network.inputs import split_batch
from credo.core.network.substitute import Draw
from credo.core.support.loader_checks import batch_count
from credo.methods.pass_file import rest_of

# Rows of the training data that the statistics of a draw are estimated from: more than the running average of training
# spans (momentum 0.1 and batches of 128: about 2,400), and 32 draws cost no more than a few epochs.
ROWS = 4096


class DrawStatistics(nn.Module):
    """Statistics by number of the draw, whose random numbers come from a seed of its own so that it can be made again.

    Row 0 of `means` and `variances` [1 + draws, channels] is the mean network's, row 1 + i that of draw i.

    Args:
        model: A network with running statistics.
        draws: Number of draws; 0: all use the statistics of the mean network.
    """

    nonnegative: ClassVar[tuple[str, ...]] = ("variances",)
    means: Tensor
    variances: Tensor
    seeds: Tensor
    are_found: Tensor

    def __init__(self, model: nn.Module, draws: int) -> None:
        super().__init__()
        self.draws = draws
        tracked = {id(layer._buffers[key]): key for layer in tracking_layers(model) for key in _KEYS}
        named = [(name, buffer, tracked.get(id(buffer))) for name, buffer in model.named_buffers()]
        self.layouts = {key: Layout({name: b for name, b, kind in named if kind == key}) for key in _KEYS}
        for name, layout in zip(("means", "variances"), self.layouts.values(), strict=True):
            self.register_buffer(
                name, torch.zeros(1 + draws, layout.size, dtype=layout.dtype, device=named[0][1].device)
            )
        self.register_buffer("seeds", torch.zeros(draws, dtype=torch.long))
        self.register_buffer("are_found", torch.tensor(False))

    def generator(self, number: int) -> torch.Generator:
        """The random numbers of a draw, on the CPU: those of another device would be others."""
        return torch.Generator().manual_seed(int(self.seeds[number % self.draws]))

    @torch.no_grad()
    def find_(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        weights: Callable[[int | None, float], Draw],
        seed: int,
        process_group: ProcessGroup | None,
    ) -> None:
        """Estimate all of them: the mean network's from all batches, a draw's from evenly spaced ones.

        Args:
            model: The network in eval mode, which is not changed.
            loader: Training batches: tensors, or tuples whose first entry is the input.
            weights: `weights(i, 1)` gives those of draw i, `weights(None, 0)` those of the mean network.
            seed: Start of the seeds of the draws.
            process_group: The processes whose batches count, if there are several.
        """
        self.seeds.copy_(torch.randint(2**62, (self.draws,), generator=torch.Generator().manual_seed(seed)))
        spaced: list[Any] = []
        found: list[dict[str, Tensor]] = []

        def resume(state: dict[str, Any]) -> None:
            found.extend({name: own[name].to(self.means.device) for name in own} for own in state["found"])
            deque(_spaced_into(spaced, loader), maxlen=0)

        for _, number in rest_of([None, *range(self.draws)], lambda: {"found": found}, resume):
            batches = _spaced_into(spaced, loader) if number is None else spaced
            found.append(statistics_of(model, batches, weights(number, float(number is not None))))
        means, variances = (torch.stack([layout.flatten(one) for one in found]) for layout in self.layouts.values())
        if process_group is not None:
            process_group.average_([means, variances])
        self.means.copy_(means)
        self.variances.copy_(variances)
        self.are_found.fill_(True)

    def of(self, number: int | None, scale: float = 1.0) -> dict[str, Tensor]:
        """Statistics by buffer name, which a pass in train mode may change.

        At another scale of the noise they are interpolated between the mean network's (0) and the draw's (1), in a way
        that is exact for the layer after the first random one if noise and signal are uncorrelated: there the mean is
        linear in the scale, the variance quadratic.

        Args:
            number: Number of the draw; None: of the mean network.
            scale: Factor on the noise of the draw.
        """
        row = 0 if number is None or not self.draws else 1 + number % self.draws
        means = torch.lerp(self.means[0], self.means[row], scale)
        first, last = self.variances[0], self.variances[row]
        variances = torch.lerp(first, last, scale**2).maximum(torch.minimum(first, last))
        mean_layout, variance_layout = self.layouts.values()
        return {**mean_layout.split(means), **variance_layout.split(variances)}


_KEYS = ("running_mean", "running_var")


def _spaced_into(spaced: list[Any], loader: Iterable[Any]) -> Iterator[Any]:
    """All batches of the loader; evenly spaced ones, with about `ROWS` rows together, are also put into the list."""
    every = most = 1
    for index, batch in enumerate(loader):
        if index == 0:
            several = isinstance(batch, tuple | list) and len(batch) > 2
            rows = len(split_batch(batch[:1] if several else batch)[0])
            most = math.ceil(ROWS / max(rows, 1))
            every = max(1, (batch_count(loader) or 1) // most)
        if index % every == 0 and len(spaced) < most:
            spaced.append(batch)
        yield batch
