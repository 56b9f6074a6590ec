"""Gradient noise of a training step by its source, and the cost of a wider σ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.core.network.inputs import run_network
from credo.core.posterior import GaussianPosterior, Posterior
from credo.doctor.no_side_effects import leaves, without_side_effects
from credo.doctor.subset import Batch, Subset


@dataclass(frozen=True)
class GradientNoise:
    """The gradient g of the mean NLL for one batch and one draw, over all trained weights.

    Attributes:
        signal: ‖E g‖², an unbiased estimate that may be negative.
        draw_variance: Trace of the covariance of g over weight draws, for the same batch.
        batch_variance: Trace of the covariance of g over batches, for the same draw.
        snr: √(signal / variance over both); None if nothing varies.
        cost: Mean increase of the NLL per example if all σ grow by a small fraction t, in nats per t; None unless
            Gaussian.
    """

    signal: float
    draw_variance: float
    batch_variance: float
    snr: float | None
    cost: float | None
    batches: int
    draws: int
    batch_size: int


def gradient_noise(
    posterior: Posterior, subset: Subset, *, batches: int = 4, draws: int = 8, seed: int = 0
) -> GradientNoise:
    """Measure gradient noise in train mode, averaged over the members of a mixture.

    Uses `batches` batches of `subset` and `draws` weight draws (and dropout masks) of `posterior`, by `seed`. Local
    reparameterisation and Flipout train with less noise than this.
    """
    size = min(subset.batch_size, max(1, len(subset) // 2))
    chosen = [batch for batch in subset.split(size) if len(batch[0]) == size][:batches]
    found = []
    # A batch of one has no statistics of its own.
    with without_side_effects(posterior, seed, training=size > 1):
        for leaf in leaves(posterior):
            found.append(_of_leaf(leaf, chosen, draws if leaf.is_random else 1))
    length, signal, draw_variance, batch_variance = (
        sum(getattr(one, name) for one in found) / len(found)
        for name in ("length", "signal", "draw_variance", "batch_variance")
    )
    variance = length - signal
    costs = [one.cost for one in found if one.cost is not None]
    return GradientNoise(
        signal=signal,
        draw_variance=draw_variance,
        batch_variance=batch_variance,
        snr=(max(signal, 0.0) / variance) ** 0.5 if variance > 0 else None,
        cost=sum(costs) / len(costs) if len(costs) == len(found) else None,
        batches=len(chosen),
        draws=found[0].draws,
        batch_size=size,
    )


@dataclass(frozen=True)
class _LeafNoise:
    length: float
    signal: float
    draw_variance: float
    batch_variance: float
    cost: float | None
    draws: int


def _of_leaf(leaf: Posterior, batches: list[Batch], draws: int) -> _LeafNoise:
    """Gradients for all pairs of draw and batch; memory holds one for each batch."""
    mean = leaf.mean() if isinstance(leaf, GaussianPosterior) else None
    by_batch = [_Sum() for _ in batches]
    by_draw: list[float] = []
    costs: list[float] = []
    squares = 0.0
    for _ in range(draws):
        weights = {name: tensor.detach() for name, tensor in leaf.draw().items()}
        of_draw = _Sum()
        for index, batch in enumerate(batches):
            gradient = _gradient(leaf, batch, weights)
            flat = torch.cat([g.flatten() for g in gradient.values()])
            squares += _dot(flat, flat)
            of_draw.add(flat)
            by_batch[index].add(flat)
            if mean is not None:
                costs.append(_cost(leaf, batch, mean, weights, gradient))
        by_draw.append(of_draw.length)
    everything = _Sum()
    for one in by_batch:
        everything.add(one.total)
    return _LeafNoise(
        *crossed(squares, by_draw, [one.length for one in by_batch], everything.length),
        cost=sum(costs) / len(costs) if costs else None,
        draws=draws,
    )


class _Sum:
    """A sum of vectors."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, vector: Tensor) -> None:
        self._total = vector.clone() if self._total is None else self._total.add_(vector)

    @property
    def total(self) -> Tensor:
        assert self._total is not None
        return self._total

    @property
    def length(self) -> float:
        return _dot(self.total, self.total)


def crossed(
    squares: float, by_draw: list[float], by_batch: list[float], everything: float
) -> tuple[float, float, float, float]:
    """(E‖g‖², ‖E g‖², variance over draws, variance over batches) of vectors g for all pairs of draw and batch.

    From `squares`, Σ ‖g‖² over all pairs, and ‖Σ g‖² of each draw (`by_draw`), of each batch (`by_batch`) and of
    `everything`. Unbiased: ‖E g‖² comes from products of pairs that share neither draw nor batch.
    """
    draws, batches = len(by_draw), len(by_batch)
    pairs = draws * batches
    over_draws = (squares - sum(by_batch) / draws) / (batches * (draws - 1)) if draws > 1 else 0.0
    over_batches = (squares - sum(by_draw) / batches) / (draws * (batches - 1)) if batches > 1 else 0.0
    if draws > 1 and batches > 1:
        apart = everything - sum(by_batch) - sum(by_draw) + squares
        signal = apart / (pairs * (draws - 1) * (batches - 1))
    elif pairs > 1:
        signal = (everything - squares) / (pairs * (pairs - 1))
    else:
        signal = squares
    return squares / pairs, signal, max(0.0, over_draws), max(0.0, over_batches)


def _cost(
    leaf: Posterior,
    batch: Batch,
    mean: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    gradient: Mapping[str, Tensor],
) -> float:
    """d/dt of the NLL at μ + (1+t)(w−μ), averaged with its mirror image μ − (w−μ), which cancels the odd part."""
    mirrored = {name: 2 * mean[name] - w if name in mean else w for name, w in weights.items()}
    other = _gradient(leaf, batch, mirrored)
    offsets = ((name, weights[name] - mean[name]) for name in mean if name in gradient)
    return 0.5 * sum(_dot(gradient[name] - other[name], offset) for name, offset in offsets)


def _gradient(leaf: Posterior, batch: Batch, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """∂(mean NLL)/∂w by name at these weights; `.grad` is not changed."""
    drawn = {name: w.detach().requires_grad_(w.is_floating_point()) for name, w in weights.items()}
    own = {name: p for name, p in leaf.model.named_parameters() if p.requires_grad and name not in drawn}
    x, y = batch[0].to(leaf.device), batch[1].to(leaf.device)
    with torch.enable_grad(), leaf.sampled(drawn) as net:
        nll = leaf.likelihood.nll(run_network(net, x), y)
        names, tensors = zip(*{**own, **drawn}.items(), strict=True)
        gradients = torch.autograd.grad(nll, tensors, allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient.detach()
        for name, tensor, gradient in zip(names, tensors, gradients, strict=True)
    }


def _dot(a: Tensor, b: Tensor) -> float:
    return float(a.flatten().double().dot(b.flatten().double()))
