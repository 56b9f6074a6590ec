"""Remove units and channels that pruning has emptied.

In eval mode the smaller network has the outputs of the pruned one, to float precision, and draws of a smaller posterior
have the same distribution. (In training mode BatchNorm would see other statistics of constant channels.)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from credo.compress.dead_units import Weights, chosen_entries, remove_dead_, select
from credo.compress.layer_resizing import resize_
from credo.compress.prune import check_prunable
from credo.compress.structure import connections
from credo.core.arguments import Group
from credo.core.description import HasMoments, WeightState
from credo.core.errors import UnsupportedModelError
from credo.core.network.flat_layout import Layout
from credo.core.posterior import Posterior
from credo.core.prior import Prior

Chosen = Mapping[str, Mapping[int, Tensor]]


@torch.no_grad()
def compact_network(model: nn.Module) -> nn.Module:
    """A copy of a network without the units whose weights are all zero, such as the mean of a pruned posterior.

    Layers keep their names. Layers whose outputs are added or used twice keep their size.
    """
    # A zero bias is not a pruned one: norms start with zeros.
    masks = {n: p != 0 if p.dim() > 1 else torch.ones_like(p, dtype=torch.bool) for n, p in model.named_parameters()}
    return _smaller(model, _weights(model, masks, {}))[0]


@torch.no_grad()
def compact(posterior: Posterior) -> Posterior:
    """A smaller posterior of the same method without the units that pruning has emptied; the given one is not changed.

    Masks of the remaining weights are kept, optimiser states are not.
    """
    check_prunable(posterior)
    std = posterior.std() if isinstance(posterior, HasMoments) else {}
    weights = _weights(posterior.model, posterior.masks(), {name: s.square() for name, s in std.items()})
    variances = {name: v.clone() for name, v in weights.variances.items()}
    model, chosen = _smaller(posterior.model, weights)
    smaller = _made_again(posterior, model, chosen)
    masks = {name: select(mask, chosen.get(name, {})) for name, mask in weights.masks.items()}
    if not all(bool(mask.all()) for mask in masks.values()):
        smaller.keep_(masks)
    new = smaller.describe().state
    for key, old in posterior.describe().state.items():
        new[key].values.copy_(_resized(key, old, new[key].layout, weights, variances, chosen))
    rest = {key: t for key, t in posterior.state_dict().items() if key.startswith("likelihood.") or key == "progress"}
    smaller.load_state_dict(rest, strict=False)
    smaller.generator.set_state(posterior.generator.get_state())
    smaller.steps = posterior.steps
    return smaller.train(posterior.training)


def _weights(model: nn.Module, masks: Mapping[str, Tensor], variances: dict[str, Tensor]) -> Weights:
    means = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Weights(means, variances, {name: mask.clone() for name, mask in masks.items()}, set())


def _smaller(model: nn.Module, weights: Weights) -> tuple[nn.Module, Chosen]:
    """The network without dead units, and the indices of its tensors that were kept."""
    found = connections(model)
    chosen = chosen_entries(model, found, remove_dead_(model, found, weights))
    new = copy.deepcopy(model)
    tensors = {**new.state_dict(), **{n: t.masked_fill(~weights.masks[n], 0.0) for n, t in weights.means.items()}}
    tensors = {name: select(t, chosen.get(name, {})) for name, t in tensors.items() if isinstance(t, Tensor)}
    resize_(new, {name: list(t.shape) for name, t in tensors.items()})
    new.load_state_dict(tensors, strict=False)
    vars(new)["credo_compact"] = True
    return new, chosen


def _made_again(posterior: Posterior, model: nn.Module, chosen: Chosen) -> Posterior:
    """A new posterior of the smaller network with the same options."""
    options, about = posterior.config(), posterior.describe()
    # Groups themselves: they may have functions, which config() cannot hold.
    options |= {n: value for n, value in posterior.arguments.items() if n in options and isinstance(value, Group)}
    if about.prior is not None and about.layout is not None:
        options["prior"] = _prior(about.prior, options["prior"], about.layout, chosen)
    kind: Any = type(posterior)
    made: Posterior = kind(model, data_size=posterior.data_size, **options)
    return made


def _prior(prior: Prior, described: Any, layout: Layout, chosen: Chosen) -> Any:
    """The prior with vectors for the smaller tensors; pruned weights, which have no entry, get 1."""
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
    """Device of the vectors."""
    return next(vector.device for vector in vectors.values() if vector is not None)


def _resized(
    key: str,
    old: WeightState,
    layout: Layout | None,
    weights: Weights,
    before: Mapping[str, Tensor],
    chosen: Chosen,
) -> Tensor:
    """A vector of the posterior's state for the smaller network; folded biases have new variances."""
    folded = [name for name in weights.folded if name in before]
    if old.layout is None or layout is None:
        if folded:
            raise UnsupportedModelError(
                f"{key} is shared by all weights of a tensor (spread='relative-layer'), but constants of dead units "
                f"change the variance of single biases, {', '.join(sorted(folded))}: this posterior can be pruned but "
                "not made smaller."
            )
        return old.values
    pieces = old.layout.split(old.values.detach(), cast=False)
    if old.refit is not None:
        for name in folded:
            pieces[name] = old.refit(pieces[name], weights.means[name], before[name], weights.variances[name])
    return layout.flatten({name: select(piece, chosen.get(name, {})) for name, piece in pieces.items()})
