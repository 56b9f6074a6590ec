"""The curvature Λ of the loss by a network's outputs, example by example, as a sum of v vᵀ over some vectors v."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from credo.core.errors import UnsupportedModelError
from credo.core.example_counts import EVERY, Counted
from credo.core.likelihood import Categorical, Likelihood, MultiLabel
from credo.core.per_example.layer_rules import widened
from credo.core.support.memory import available_bytes
from credo.methods.kfac.sampled_fisher import sampled_targets

CURVATURES = ("ggn", "sampled", "empirical")


@dataclass(frozen=True)
class Targets:
    """The targets of a batch, and which of its rows count.

    Attributes:
        y: The targets.
        counted: n and w of the loss Σ w·ℓ / n.
        examples: n, in rows of the batch: a row of whose positions half are ignored is half a row.
        mask: Which positions count, [batch, *positions], where only some do.
    """

    y: Tensor
    counted: Counted
    examples: float
    mask: Tensor | None = None


def counted_targets(likelihood: Likelihood, y: Tensor) -> Targets:
    """The targets of a batch, of which those labelled with an `ignore_index` do not count.

    Args:
        likelihood: The likelihood.
        y: The targets.
    """
    if isinstance(likelihood, MultiLabel):
        known = likelihood.known(y)
        return Targets(y, EVERY, likelihood.counted(y).of(len(y)), None if bool(known.all()) else known)
    if not isinstance(likelihood, Categorical):
        counted = likelihood.counted(y)
        return Targets(y, counted, counted.of(len(y)))
    if likelihood.class_weights is not None:
        if y.dim() > 1:
            raise UnsupportedModelError(
                "class_weights with a label for each position have no curvature of their own: leave class_weights out."
            )
        counted = likelihood.counted(y)
        return Targets(y, counted, counted.of(len(y)))
    mask = y != likelihood.ignore_index
    if bool(mask.all()):
        return Targets(y, EVERY, float(len(y)))
    if not bool(mask.any()):
        raise ValueError(
            f"All labels of a batch are {likelihood.ignore_index}, which means that they are to be ignored."
        )
    if y.dim() == 1:
        counted = Counted(None, mask.double())
        return Targets(y, counted, counted.of(len(y)))
    examples = float(mask.double().mean()) * len(y)
    return Targets(y, EVERY, examples, mask)


@dataclass(frozen=True)
class OutputCurvature:
    """Λ of each example of a batch.

    Attributes:
        likelihood: Gives the exact Λ, of the generalised Gauss-Newton matrix.
        outputs: The network's outputs.
        targets: The targets, which tell what counts.
        gradients: [batch, outputs]: the one vector v of each example, in the place of the exact Λ.
    """

    likelihood: Likelihood
    outputs: Tensor
    targets: Targets
    gradients: Tensor | None = None

    def vectors(self) -> Tensor:
        """[batch, vectors, outputs], with outputs flattened; zero at positions that do not count."""
        if self.gradients is not None:
            vectors = self.gradients.unsqueeze(1)
        else:
            _check_memory(self.outputs)
            found = self.likelihood.curvature_factors(self.outputs)
            vectors = found.reshape(*found.shape[:2], -1).transpose(0, 1)
        mask = self.targets.mask
        if mask is None:
            return vectors
        if isinstance(self.likelihood, MultiLabel):
            return vectors * mask.flatten(1).unsqueeze(1)
        assert isinstance(self.likelihood, Categorical)  # the only other one that ignores positions
        return vectors * mask.unsqueeze(self.likelihood.class_dim).expand_as(self.outputs).reshape(len(mask), 1, -1)

    def total(self) -> Tensor:
        """Σ Λ over the examples, as often as each counts, [outputs, outputs]."""
        weights = self.targets.counted.weights
        if self.gradients is None and self.targets.mask is None and weights is None:
            return self.likelihood.curvature_sum(self.outputs)
        vectors = self.vectors()
        if weights is not None:
            vectors = vectors * weights.to(vectors).sqrt()[:, None, None]
        vectors = vectors.flatten(0, 1)
        return vectors.T @ vectors

    def diagonal(self) -> Tensor:
        """The diagonal of each Λ, [batch, outputs]."""
        if self.gradients is None and self.targets.mask is None:
            return self.likelihood.curvature_diagonal(self.outputs)
        return self.vectors().square().sum(1)

    def counting(self) -> tuple[OutputCurvature, Tensor | None]:
        """The same without the rows that do not count, and which of all rows are left; None: all."""
        weights = self.targets.counted.weights
        if weights is None:
            return self, None
        rows = (weights > 0).to(self.outputs.device)
        own = weights[weights > 0]
        counted = EVERY if bool((own == 1).all()) else Counted(self.targets.examples, own)
        targets = Targets(self.targets.y[rows], counted, self.targets.examples)
        gradients = None if self.gradients is None else self.gradients[rows]
        return replace(self, outputs=self.outputs[rows], targets=targets, gradients=gradients), rows


def _check_memory(outputs: Tensor) -> None:
    """Raise UnsupportedModelError if there is no memory for as many vectors as there are outputs."""
    size = outputs[:1].numel()
    needed, available = len(outputs) * size**2 * outputs.element_size(), available_bytes(outputs.device)
    if needed > available:
        raise UnsupportedModelError(
            f"The exact curvature of {size:,} outputs needs as many backward passes, and {needed / 1e9:,.1f} GB for a "
            f"batch of {len(outputs)}, of which {available / 1e9:,.1f} GB are free: use curvature='sampled'."
        )


def output_curvature(
    kind: str, likelihood: Likelihood, outputs: Tensor, targets: Targets, generator: torch.Generator
) -> OutputCurvature:
    """Λ of a batch.

    Args:
        kind: `"ggn"` for the exact one, `"sampled"` for v the gradient by the outputs at one label that the network
            itself predicts, `"empirical"` at the true one.
        likelihood: The likelihood.
        outputs: The network's outputs.
        targets: The targets.
        generator: Source of the labels.
    """
    outputs = widened(outputs.detach())
    if kind == "ggn":
        return OutputCurvature(likelihood, outputs, targets)
    y = targets.y if kind == "empirical" else sampled_targets(likelihood, outputs, generator)
    return OutputCurvature(likelihood, outputs, targets, _row_gradients(likelihood, outputs, y))


def _row_gradients(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """Gradients [batch, outputs] of each row's own NLL, times √positions where that is a mean over positions.

    Labels of different positions are independent: on average over labels the squares of the gradient of a mean over T
    positions are Σ Λ/T², and the curvature of the mean is Σ Λ/T.
    """
    found = counted_targets(likelihood, y)
    with torch.enable_grad():
        leaf = outputs.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(likelihood.nll(leaf, y), leaf)
    positions = 1
    if isinstance(likelihood, Categorical):
        positions = math.prod(outputs.shape[1:]) // outputs.shape[likelihood.class_dim]
    gradient = gradient.reshape(len(outputs), -1) * (found.examples * math.sqrt(positions))
    weights = found.counted.weights
    if weights is None:
        return gradient
    return gradient / torch.where(weights > 0, weights, 1.0).to(gradient).unsqueeze(1)
