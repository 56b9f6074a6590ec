"""Held-out rows of other targets than one class or a Gaussian value: positions, several labels, counts, times."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from credo.calibration.rows import ClassRows, HeldOut, joined_digests
from credo.core.held_out.ledger import Digests
from credo.core.likelihood import Categorical, DistributionLikelihood, MultiLabel


class PositionRows(HeldOut):
    """Rows with a class for each position: pixels, tokens.

    The NLL of a row is the sum over its positions, divided by the mean number of positions of all rows: then the mean
    over rows is that over positions, and all positions of one row, which depend on each other, weigh as much as a row.

    Args:
        digests: Of each row.
        positions: Every position that counts, as a row of its own.
        owner: The row [positions] that each position is of.
        size: Mean number of positions of a row; None: of these rows.
    """

    def __init__(self, digests: Digests, positions: ClassRows, owner: Tensor, size: float | None = None) -> None:
        super().__init__(digests)
        self.positions, self.owner = positions, owner
        self.size = len(owner) / len(digests) if size is None else size

    @classmethod
    def of(cls, likelihood: Categorical, outputs: Tensor, digests: Digests, y: Tensor, stride: int) -> PositionRows:
        """Every `stride`-th position of some rows.

        Args:
            likelihood: Says which dimension holds the classes, and which label does not count.
            outputs: [draws, rows, …].
            digests: Of each row.
            y: Labels [rows, *positions].
            stride: 1 for all positions.
        """
        log_probs = likelihood.log_probs(outputs)
        if y.shape != log_probs.shape[1:-1]:
            raise ValueError(f"Labels must have shape {list(log_probs.shape[1:-1])}; got {list(y.shape)}.")
        labels, number = y.flatten(1).long(), torch.arange(y[0].numel())
        row = torch.arange(len(y)).unsqueeze(1)
        chosen = (labels != likelihood.ignore_index) & ((number + row) % stride == 0)
        found, classes = labels[chosen], log_probs.shape[-1]
        if bool(((found < 0) | (found >= classes)).any()):
            raise ValueError(
                f"Labels run from {int(found.min())} to {int(found.max())}, but there are {classes} classes."
            )
        kept = log_probs.flatten(2, -2)[:, chosen].float()
        owner = row.expand_as(chosen)[chosen]
        return cls(digests, ClassRows(np.zeros(len(owner), dtype=digests.dtype), kept, found), owner)

    def nll_each(self, log_scale: float) -> Tensor:
        """−log of the averaged probabilities of the labels, summed over positions, over the mean number of them."""
        each = self.positions.nll_each(log_scale)
        return each.new_zeros(len(self.digests)).index_add(0, self.owner, each) / max(self.size, 1e-12)

    def at(self, chosen: Tensor) -> PositionRows:
        """Some of the rows, by a mask."""
        inside, number = chosen[self.owner], chosen.cumsum(0) - 1
        kept = self.digests[chosen.numpy()]
        return PositionRows(kept, self.positions.at(inside), number[self.owner[inside]], self.size)

    @classmethod
    def joined(cls, parts: Sequence[PositionRows]) -> PositionRows:
        """The rows of several batches."""
        first = [0, *np.cumsum([len(part.digests) for part in parts]).tolist()]
        owner = torch.cat([part.owner + start for part, start in zip(parts, first, strict=False)])
        digests = joined_digests(parts)
        return cls(digests, ClassRows.joined([part.positions for part in parts]), owner)


class LabelRows(HeldOut):
    """Rows with several yes-or-no labels; a temperature divides their logits.

    Args:
        digests: Of each row.
        logits: [draws, rows, labels], flattened.
        targets: 0 or 1, NaN where it is not known, [rows, labels].
    """

    def __init__(self, digests: Digests, logits: Tensor, targets: Tensor) -> None:
        super().__init__(digests)
        self.logits, self.targets = logits, targets

    @classmethod
    def of(cls, likelihood: MultiLabel, outputs: Tensor, digests: Digests, y: Tensor) -> LabelRows:
        """Rows of some outputs [draws, rows, …]; raises ValueError if targets have another shape.

        Args:
            likelihood: Says which targets are known.
            outputs: Logits.
            digests: Of each row.
            y: Targets.
        """
        if y.shape != outputs.shape[1:]:
            raise ValueError(f"Targets of shape {list(y.shape)} for labels {list(outputs.shape[1:])}.")
        targets = y.double().masked_fill(~likelihood.known(y), math.nan)
        return cls(digests, outputs.flatten(2).float(), targets.flatten(1))

    def nll_each(self, log_scale: float) -> Tensor:
        """−log of the averaged probability of all labels of a row together."""
        logits = self.logits.double() * math.exp(-log_scale)
        y, known = self.targets.nan_to_num().expand_as(logits), ~self.targets.isnan()
        joint = -(F.binary_cross_entropy_with_logits(logits, y, reduction="none") * known).sum(-1)
        return math.log(len(joint)) - joint.logsumexp(0)

    def at(self, chosen: Tensor) -> LabelRows:
        """Some of the rows, by a mask."""
        return LabelRows(self.digests[chosen.numpy()], self.logits[:, chosen], self.targets[chosen])

    @classmethod
    def joined(cls, parts: Sequence[LabelRows]) -> LabelRows:
        """The rows of several batches."""
        logits, targets = torch.cat([p.logits for p in parts], 1), torch.cat([p.targets for p in parts])
        return cls(joined_digests(parts), logits, targets)


class DensityRows(HeldOut):
    """Rows of counts, times and values whose distribution has no temperature: only the noise of weights is scaled.

    Args:
        digests: Of each row.
        log_density: Of a row's whole target under each draw, [draws, rows].
    """

    has_temperature = False

    def __init__(self, digests: Digests, log_density: Tensor) -> None:
        super().__init__(digests)
        self.log_density = log_density

    @classmethod
    def of(
        cls, likelihoods: Sequence[DistributionLikelihood], outputs: Tensor, digests: Digests, y: Tensor
    ) -> DensityRows:
        """Rows of some outputs [draws, rows, …].

        Args:
            likelihoods: One, or those of a mixture's members, which the draws are of in turn.
            outputs: Of all draws.
            digests: Of each row.
            y: Targets.
        """
        likelihoods[0].check_targets(y, likelihoods[0].distribution(outputs[0]))
        each = [likelihoods[i % len(likelihoods)].log_prob(one, y.to(one.dtype)) for i, one in enumerate(outputs)]
        return cls(digests, torch.stack(each).reshape(len(outputs), len(y), -1).sum(-1))

    def nll_each(self, log_scale: float) -> Tensor:
        """−log of the averaged density; there is no temperature."""
        return math.log(len(self.log_density)) - self.log_density.logsumexp(0)

    def at(self, chosen: Tensor) -> DensityRows:
        """Some of the rows, by a mask."""
        return DensityRows(self.digests[chosen.numpy()], self.log_density[:, chosen])

    @classmethod
    def joined(cls, parts: Sequence[DensityRows]) -> DensityRows:
        """The rows of several batches."""
        digests = joined_digests(parts)
        return cls(digests, torch.cat([part.log_density for part in parts], dim=1))
