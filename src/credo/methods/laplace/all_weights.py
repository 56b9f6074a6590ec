"""How much of the residuals of a regression all weights have fitted, where only some of them are random.

The evidence finds a noise by residuals² / (n − γ), γ the effective number of weights. All weights that were trained had
a part in the residuals, so γ is that of the Laplace approximation of all of them, with the exact curvature JᵀJ/σ² and
one prior precision. Its eigenvalues are those of JJᵀ/σ² [targets, targets], whatever the number of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.distributed.process_group import ProcessGroup
from credo.core.network.inputs import AnyInputs, split_batch
from credo.core.network.selection import random_names
from credo.core.network.substitute import parameters_at
from credo.methods.laplace.jacobians import jacobian_chunks

# Targets that γ is found for, at most, and memory of their Jacobians.
MOST_TARGETS, MOST_BYTES = 1000, 128 * 2**20


class AllWeights:
    """The first rows of a pass, of whose Jacobians by all weights the eigenvalues are wanted.

    Args:
        model: The network that is passed over, in eval mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.weights = model, parameters_at(model, random_names(model, "all"))
        self._rows: list[tuple[AnyInputs, int, int]] = []

    @property
    def squares(self) -> float:
        """Σ θ²."""
        return sum(float(p.detach().double().square().sum()) for p in self.weights.values())

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches; inputs of the first ones are kept when they are read."""
        bytes_each = 8 * sum(p.numel() for p in self.weights.values())
        left = min(MOST_TARGETS, max(1, MOST_BYTES // bytes_each))
        for batch in batches:
            x, y = split_batch(batch)
            if left > 0 and y is not None and len(x):
                outputs = max(1, y.numel() // len(x))
                count = min(len(x), max(1, left // outputs))
                self._rows.append((x, count, outputs))
                left -= count * outputs
            yield batch

    @torch.no_grad()
    def spectrum(self, device: torch.device, group: ProcessGroup | None) -> Tensor | None:
        """Eigenvalues of JJᵀ/n of the n rows; None if there are no rows, or no Jacobians of single ones.

        Args:
            device: Where the network is.
            group: The processes, of which the first has the rows; None: this one.
        """
        found = self._own(device) if group is None or group.is_first else None
        shared: Tensor | None = found if group is None else group.share(found)
        return shared

    def _own(self, device: torch.device) -> Tensor | None:
        parts: list[Tensor] = []
        try:
            for x, count, outputs in self._rows:
                for _, _, found in jacobian_chunks(self.model, x[:count].to(device), self.weights, outputs=outputs):
                    parts.append(torch.cat([each.flatten(2) for each in found.values()], -1).flatten(0, 1).double())
        except (
            RuntimeError,
            TypeError,
            ValueError,
            IndexError,
        ):  # of inputs that cannot be taken apart, such as graphs
            return None
        if not parts:
            return None
        rows = torch.cat(parts)
        spectrum: Tensor = torch.linalg.eigvalsh(rows @ rows.T).clamp_min(0).cpu()
        return spectrum / sum(count for _, count, _ in self._rows)
