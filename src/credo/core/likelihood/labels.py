"""Several yes-or-no labels for each example."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from credo.core.example_counts import EVERY, Counted
from credo.core.likelihood.base import Likelihood, Random
from credo.core.likelihood.classes import IGNORED
from credo.core.support.validate import is_number


class MultiLabel(Likelihood):
    """Labels of which several can be true at once, each with its own logit.

    Outputs and targets (0 or 1, or `ignore_index`) are [batch, labels]. Given the weights, the labels are independent.

    Args:
        positive_weights: How often the loss of each label counts where its target is 1, against once where it is 0, for
            rare labels. Probabilities are then those of data with so many more positives. None: once.
        ignore_index: Target of labels that are not known: they have no loss, no gradient and no metric. An example
            counts if any of its labels is known.
    """

    task = "multi-label"
    kind = "multi-label"

    def __init__(self, positive_weights: Sequence[float] | None = None, ignore_index: int = IGNORED) -> None:
        super().__init__()
        if not isinstance(ignore_index, int) or ignore_index in (0, 1):
            raise ValueError(f"ignore_index={ignore_index!r:.80} must be a whole number other than 0 and 1, as -100.")
        self.ignore_index = ignore_index
        values = None if positive_weights is None else [*positive_weights]
        if values is not None and not (values and all(is_number(v) and 0 < v < math.inf for v in values)):
            raise ValueError(f"positive_weights={positive_weights!r:.80} must be one positive number for each label.")
        self.positive_weights = None if values is None else [float(v) for v in values]

    def known(self, y: Tensor) -> Tensor:
        """Which targets are known.

        Args:
            y: Targets.
        """
        return y != self.ignore_index

    def counted(self, y: Tensor) -> Counted:
        """Examples without a known label do not count."""
        rows = int(self.known(y).flatten(1).any(1).sum())
        return EVERY if rows == len(y) else Counted(rows)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Mean over the examples that count."""
        return self.nll_each(outputs, y).sum() / self.counted(y).of(len(y))

    def nll_each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Binary cross-entropy, summed over the known labels of an example."""
        if outputs.dim() < 2 or y.shape != outputs.shape:
            raise ValueError(
                f"MultiLabel needs outputs [batch, labels] and targets of the same shape, 0 or 1 for each label; got "
                f"{list(outputs.shape)} and {list(y.shape)}. For one class out of several use likelihood='categorical'."
            )
        known = self.known(y)
        y = torch.where(known, y, 0).to(outputs.dtype)
        possible = (y >= 0) & (y <= 1)
        if not bool(possible.all()):
            raise ValueError(
                f"Targets of MultiLabel are 0 or 1, and {self.ignore_index} where a label is not known; got "
                f"{float(y[~possible][0]):g}. In place of NaN: y.nan_to_num({self.ignore_index})."
            )
        weight = None if self.positive_weights is None else outputs.new_tensor(self.positive_weights)
        if weight is not None and len(weight) != outputs.shape[-1]:
            raise ValueError(f"positive_weights has {len(weight)} entries for {outputs.shape[-1]} labels.")
        each = F.binary_cross_entropy_with_logits(outputs, y, pos_weight=weight, reduction="none")
        return torch.where(known, each, 0.0).flatten(1).sum(1)

    def sample(self, outputs: Tensor, random: Random) -> Tensor:
        """Draw each label."""
        return (random(outputs, "uniform") < outputs.sigmoid()).to(outputs.dtype)

    def curvature_factors(self, outputs: Tensor) -> Tensor:
        """√(p(1 − p)) for each label: a diagonal."""
        roots = self.curvature_diagonal(outputs).sqrt()
        eye = torch.eye(roots.shape[1], dtype=roots.dtype, device=roots.device)
        return (eye.unsqueeze(1) * roots).view(-1, *outputs.shape)

    def curvature_sum(self, outputs: Tensor) -> Tensor:
        """A diagonal: labels are independent."""
        return torch.diag(self.curvature_diagonal(outputs).sum(0))

    def curvature_diagonal(self, outputs: Tensor) -> Tensor:
        """p(1 − p); with weights of positives the expected square of the gradient."""
        p = outputs.sigmoid()
        if self.positive_weights is None:
            return (p * (1 - p)).flatten(1)
        # The gradient is −w(1 − p) with probability p, and p otherwise.
        weight = outputs.new_tensor(self.positive_weights)
        return (p * (weight * (1 - p)).square() + (1 - p) * p.square()).flatten(1)
