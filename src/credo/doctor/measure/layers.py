"""Posterior of the weights against their prior, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.core.network.flat_layout import Layout
from credo.core.posterior import GaussianPosterior, Posterior
from credo.doctor.no_side_effects import leaves
from credo.doctor.thresholds import COLLAPSED_NATS

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class LayerState:
    """One named parameter tensor (or all of them), pooled over the members of a mixture.

    `snr` is the median of |μ|/σ and `snr_quantiles` its 5, 25, 50, 75 and 95 %, `std` the median σ. If the prior is
    known, `std_ratio` is the median of σ over its standard deviation, `collapsed` the fraction of weights within 0.01
    nats of it, `kl` that of one member in nats.
    """

    name: str
    weights: int
    dims: int
    snr: float
    snr_quantiles: list[float]
    std: float
    std_ratio: float | None
    collapsed: float | None
    kl: float | None


def gaussian_leaves(posterior: Posterior) -> list[GaussianPosterior]:
    """The Gaussian members of a posterior; empty for a point estimate or dropout."""
    return [leaf for leaf in leaves(posterior) if isinstance(leaf, GaussianPosterior)]


def unpruned_layout(leaf: GaussianPosterior) -> Layout:
    """The random weights that are not pruned, as one vector."""
    layout = Layout(leaf.mean())
    return layout if leaf.kept is None else layout.narrowed(leaf.masks())[0]


def prior_moments(leaf: GaussianPosterior) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
    """Mean and standard deviation of the prior by parameter name; None if the method does not describe its prior."""
    layout = unpruned_layout(leaf)
    prior = leaf.describe().prior
    if prior is None:
        return None
    flat = []
    for value in prior.moments_for(layout.flatten(leaf.mean()), layout.flatten(leaf.std())):
        try:
            flat.append(torch.as_tensor(value, dtype=layout.dtype).cpu().expand(layout.size))
        except RuntimeError:  # a vector over other weights
            return None
    return layout.split(flat[0]), layout.split(flat[1])


def kl_each(mean: Tensor, std: Tensor, prior_mean: Tensor, prior_std: Tensor) -> Tensor:
    """KL(N(`mean`, `std`²) ‖ N(`prior_mean`, `prior_std`²)) of each weight, in nats."""
    ratio = (std / prior_std).square()
    # −log(ratio) + ratio − 1 cancels where both agree, the case of interest: needs float64.
    return 0.5 * (ratio - 1 - ratio.log() + ((mean - prior_mean) / prior_std).square())


def layer_states(posterior: Posterior) -> list[LayerState]:
    """The state of every random parameter tensor; empty for methods that are not Gaussian.

    Priors that are not Gaussian are compared by their mean and standard deviation.
    """
    found = gaussian_leaves(posterior)
    if not found:
        return []
    pieces = [_pieces(leaf) for leaf in found]
    names = [name for name in pieces[0] if all(name in piece for piece in pieces)]
    return [_state(name, [piece[name] for piece in pieces], members=len(found)) for name in names]


def whole_state(posterior: Posterior) -> LayerState | None:
    """The state of all random weights together; None for methods that are not Gaussian."""
    found = gaussian_leaves(posterior)
    if not found:
        return None
    return _state("all", [piece for leaf in found for piece in _pieces(leaf).values()], members=len(found))


# mean, std, prior mean, prior std
_Piece = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _pieces(leaf: GaussianPosterior) -> dict[str, _Piece]:
    mean, std, prior = leaf.mean(), leaf.std(), prior_moments(leaf)
    sources = (mean, std, *(prior or (None, None)))
    masks = {} if leaf.kept is None else leaf.masks()
    return {
        name: tuple(None if source is None else _unpruned(_double(source[name]), masks.get(name)) for source in sources)  # type: ignore[misc]
        for name in mean
        if name not in masks or bool(masks[name].any())
    }


def _unpruned(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """The entries of a tensor that are not pruned, with the same number of dimensions."""
    return tensor if mask is None else tensor[mask.cpu()].reshape(-1, *[1] * (tensor.dim() - 1))


def _state(name: str, pieces: Sequence[_Piece], *, members: int) -> LayerState:
    mean, std, prior_mean, prior_std = (_joined([piece[i] for piece in pieces]) for i in range(4))
    assert mean is not None
    assert std is not None
    # Without noise (before the first step of some methods) the ratio is infinite, also for a mean of 0.
    snr = torch.where(std > 0, mean.abs() / std, torch.inf)
    std_ratio = collapsed = total = None
    if prior_mean is not None and prior_std is not None:
        kl = kl_each(mean, std, prior_mean, prior_std)
        std_ratio = float((std / prior_std).median())
        collapsed = float((kl < COLLAPSED_NATS).double().mean())
        total = float(kl.sum()) / members
    return LayerState(
        name=name,
        weights=mean.numel() // members,
        dims=max(piece[0].dim() for piece in pieces),
        snr=float(snr.median()),
        snr_quantiles=quantiles(snr, QUANTILES),
        std=float(std.median()),
        std_ratio=std_ratio,
        collapsed=collapsed,
        kl=total,
    )


def quantiles(values: Tensor, levels: Sequence[float]) -> list[float]:
    """Quantiles by rank (the lower of two neighbours); torch.quantile is limited to 16 million values."""
    ordered = values.flatten().sort().values
    return [float(ordered[int(level * (len(ordered) - 1))]) for level in levels]


def _joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    known = [tensor.flatten() for tensor in tensors if tensor is not None]
    return torch.cat(known) if len(known) == len(tensors) else None


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()
