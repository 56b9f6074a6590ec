"""Really smaller networks: units and channels that pruning left without weights disappear.

In eval mode the smaller network says what the pruned one says, to float precision, and draws of a smaller posterior
have the same distribution. (In training mode BatchNorm would see other statistics of constant channels.)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from credo.compress.dead_units import Weights, chosen_entries, remove_dead_, select
from credo.compress.layer_resizing import resize_
from credo.compress.prune import check_prunable
from credo.compress.structure import links
from credo.core.errors import UnsupportedModelError
from credo.core.network.flat_layout import Layout
from credo.core.posterior import GaussianPosterior, Posterior
from credo.core.prior import Prior
from credo.methods.bbb.bbb import BBB
from credo.methods.natural.diagonal import NaturalGaussian

Chosen = Mapping[str, Mapping[int, Tensor]]


@torch.no_grad()
def compact_network(model: nn.Module) -> nn.Module:
    """A copy of a network without the units whose weights are all exactly zero: the mean of a pruned posterior, say.

    Layers keep their names. What cannot be followed (outputs that are added or read twice) keeps its size.
    """
    # A bias that is zero was not pruned for that; norms begin with zeros.
    masks = {n: p != 0 if p.dim() > 1 else torch.ones_like(p, dtype=torch.bool) for n, p in model.named_parameters()}
    return _smaller(model, _weights(model, masks, {}))[0]


@torch.no_grad()
def compact(posterior: Posterior) -> Posterior:
    """A smaller posterior of the same method without the units that pruning has emptied; the given one is not changed.

    Masks of the weights that stay go along. Optimiser states do not, nor do functions given as optimiser or KL weight,
    as in saved files.
    """
    check_prunable(posterior)
    std = posterior.std() if isinstance(posterior, GaussianPosterior) else {}
    weights = _weights(posterior.model, posterior.masks(), {name: s.square() for name, s in std.items()})
    variances = {name: v.clone() for name, v in weights.variances.items()}
    model, chosen = _smaller(posterior.model, weights)
    smaller = _made_again(posterior, model, chosen)
    masks = {name: select(mask, chosen.get(name, {})) for name, mask in weights.masks.items()}
    if not all(bool(mask.all()) for mask in masks.values()):
        smaller.keep_(masks)
    for key, vector in _vectors(posterior, weights, variances, chosen, smaller).items():
        getattr(smaller, key).copy_(vector)
    smaller.likelihood.load_state_dict(posterior.likelihood.state_dict())
    smaller.generator.set_state(posterior.generator.get_state())
    smaller.steps = posterior.steps
    if isinstance(posterior, NaturalGaussian):
        cast(NaturalGaussian, smaller).has_curvature = posterior.has_curvature
    return smaller.train(posterior.training)


def _weights(model: nn.Module, masks: Mapping[str, Tensor], variances: dict[str, Tensor]) -> Weights:
    means = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Weights(means, variances, {name: mask.clone() for name, mask in masks.items()}, set())


def _smaller(model: nn.Module, weights: Weights) -> tuple[nn.Module, Chosen]:
    """The network without dead units, and which entries of its tensors it kept."""
    found = links(model)
    chosen = chosen_entries(model, found, remove_dead_(model, found, weights))
    new = copy.deepcopy(model)
    tensors = {**new.state_dict(), **{n: t.masked_fill(~weights.masks[n], 0.0) for n, t in weights.means.items()}}
    tensors = {name: select(t, chosen.get(name, {})) for name, t in tensors.items() if isinstance(t, Tensor)}
    resize_(new, {name: list(t.shape) for name, t in tensors.items()})
    new.load_state_dict(tensors, strict=False)
    vars(new)["credo_compact"] = True
    return new, chosen


def _made_again(posterior: Posterior, model: nn.Module, chosen: Chosen) -> Posterior:
    """A posterior with the same options over the smaller network; its state is still a new one's."""
    options = posterior.config()
    if options.get("optimizer", "") is None:  # a function, which a description does not hold
        options["optimizer"] = cast(Any, posterior).descent.choice
    if options.get("kl_weight", "") is None:
        options["kl_weight"] = cast(Any, posterior).kl_weight
    prior = getattr(posterior, "prior", None)
    layout = getattr(posterior, "layout", None)
    if prior is not None and layout is not None:
        options["prior"] = _prior(prior, options["prior"], layout, chosen)
    kind: Any = type(posterior)
    made: Posterior = kind(model, data_size=posterior.data_size, **options)
    return made


def _prior(prior: Prior, described: Any, layout: Layout, chosen: Chosen) -> Any:
    """The prior with its vectors by name for the smaller tensors; pruned weights have none, and get one."""
    vectors = {key: getattr(prior, f"{key}_vector", None) for key in ("mean", "scale")}
    if all(vector is None for vector in vectors.values()):
        return described
    marks = layout.split(torch.ones(layout.size, device=_device(vectors)))
    values: list[Any] = []
    for key, vector in vectors.items():
        pieces = None if vector is None else {n: t.where(marks[n] > 0, 1.0) for n, t in layout.split(vector).items()}
        small = None if pieces is None else {n: select(t, chosen.get(n, {})) for n, t in pieces.items()}
        values.append(getattr(prior, key) if small is None else small)
    kind: Any = type(prior)
    return kind(*values)


def _device(vectors: Mapping[str, Tensor | None]) -> torch.device:
    """Where the vectors are."""
    return next(vector.device for vector in vectors.values() if vector is not None)


def _vectors(
    posterior: Posterior, weights: Weights, before: Mapping[str, Tensor], chosen: Chosen, smaller: Posterior
) -> dict[str, Tensor]:
    """The posterior's own vectors for the smaller network: ρ, or momentum and curvature."""
    if isinstance(posterior, BBB):
        return {"rho": _rho(posterior, weights, before, chosen, cast(BBB, smaller))}
    if isinstance(posterior, NaturalGaussian):
        layout, new = posterior.vector.layout, cast(NaturalGaussian, smaller).vector.layout
        curvature = layout.split(posterior.curvature, cast=False)
        for name in (n for n in weights.folded if n in before and posterior.has_curvature):
            # σ² = scale/(curvature + …), whatever the rest is.
            change = 1 / weights.variances[name].double() - 1 / before[name].double()
            curvature[name] = curvature[name] + (posterior.variance_scale * change).to(curvature[name].dtype)
        momentum = layout.split(posterior.momentum, cast=False)
        return {"momentum": _small(momentum, chosen, new), "curvature": _small(curvature, chosen, new)}
    return {}


def _rho(posterior: BBB, weights: Weights, before: Mapping[str, Tensor], chosen: Chosen, smaller: BBB) -> Tensor:
    folded = [name for name in weights.folded if name in before]
    if not posterior.spread.per_weight:
        if folded:
            raise UnsupportedModelError(
                "spread='relative-layer' has one α for a whole tensor, and what dead units leave in the biases "
                f"{', '.join(sorted(folded))} has another: such a posterior can be pruned but not made smaller."
            )
        return posterior.rho.detach()
    pieces = posterior.layout.split(posterior.rho.detach())
    for name in folded:
        pieces[name] = posterior.spread.rho_for(weights.means[name], weights.variances[name].sqrt())
    return _small(pieces, chosen, smaller.layout)


def _small(pieces: Mapping[str, Tensor], chosen: Chosen, layout: Layout) -> Tensor:
    return layout.flatten({name: select(piece, chosen.get(name, {})) for name, piece in pieces.items()})
