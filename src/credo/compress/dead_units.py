"""Units that say nothing any more: all their incoming weights are pruned, or all that is read from them.

The former still say a constant, act(bias), which the next layer's bias takes over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from credo.compress.structure import NORMS, Link
from credo.core.network.selection import join


@dataclass
class Weights:
    """Means of all parameters, variances of the random ones, and which are not pruned; all changed by `remove_dead_`.

    `folded` are the biases that took over constants.
    """

    means: dict[str, Tensor]
    variances: dict[str, Tensor]
    masks: dict[str, Tensor]
    folded: set[str]


def remove_dead_(model: nn.Module, found: Iterable[Link], weights: Weights) -> dict[str, Tensor]:
    """Marks of the units that stay, by the path of their layer; what is read from the others is pruned.

    A unit stays whose constant is random (its bias is) or cannot be folded exactly: into a padded convolution, whose
    borders read zeros instead of it, or into a layer without a bias of the same kind. One unit of a layer always does.
    """
    found = list(found)
    alive = {
        link.source: torch.ones(len(weights.means[join(link.source, "weight")]), dtype=torch.bool) for link in found
    }
    changed = True
    while changed:  # a unit may die because those that it reads do
        changed = False
        for link in found:
            dead = _dead(model, link, weights) & alive[link.source]
            if bool(dead.any()):
                alive[link.source] &= ~dead
                changed = True
    for marks in alive.values():
        marks[0] |= not bool(marks.any())
    return alive


def _dead(model: nn.Module, link: Link, weights: Weights) -> Tensor:
    """Units that can go; their constants are folded, and their weights pruned on both sides."""
    name, reader = join(link.source, "weight"), join(link.target, "weight")
    units = len(weights.masks[name])
    read = weights.masks[reader].transpose(0, 1).reshape(units, -1)
    unread = ~read.any(dim=1).cpu()
    constant = _constants(model, link, weights)
    silent = ~weights.masks[name].reshape(units, -1).any(dim=1).cpu() & constant.isfinite().cpu() & ~unread
    loud = silent & (constant != 0).cpu()
    if bool(loud.any()):
        if _can_fold(model, link, weights, loud):
            _fold_(link, weights, torch.where(loud.to(constant.device), constant, torch.zeros_like(constant)))
        else:
            silent &= ~loud
    dead = unread | silent
    for key in (name, join(link.source, "bias")):
        if key in weights.masks:
            weights.masks[key][dead] = False
    weights.masks[reader][:, dead.repeat_interleave(link.spread)] = False
    return dead


def _constants(model: nn.Module, link: Link, weights: Weights) -> Tensor:
    """What each unit says if it reads nothing, in eval mode; NaN where that is random."""
    means = weights.means
    units = len(means[join(link.source, "weight")])
    values = means.get(join(link.source, "bias"), means[join(link.source, "weight")].new_zeros(units)).clone()
    values[_is_random(join(link.source, "bias"), weights, units)] = torch.nan
    for step in link.steps:
        module: Any = model.get_submodule(step) if isinstance(step, str) else step
        if not isinstance(module, NORMS):
            values = module(values)
            continue
        assert module.running_mean is not None  # else it would be no step of a link
        assert module.running_var is not None
        values = (values - module.running_mean) / torch.sqrt(module.running_var + module.eps)
        for key, combine in (("weight", torch.mul), ("bias", torch.add)):
            if join(str(step), key) in means:
                values = combine(values, means[join(str(step), key)])
                values[_is_random(join(str(step), key), weights, units)] = torch.nan
    return values


def _is_random(name: str, weights: Weights, units: int) -> Tensor:
    variance = weights.variances.get(name)
    return torch.zeros(units, dtype=torch.bool) if variance is None else (variance > 0).cpu()


def _can_fold(model: nn.Module, link: Link, weights: Weights, loud: Tensor) -> bool:
    target: Any = model.get_submodule(link.target)
    bias, weight = join(link.target, "bias"), join(link.target, "weight")
    if target.bias is None or (weight in weights.variances) > (bias in weights.variances):
        return False
    padded = isinstance(target, nn.Conv2d) and target.padding not in (0, (0, 0), "valid")
    readers = weights.masks[weight][:, loud.repeat_interleave(link.spread)].flatten(1).any(dim=1)
    return not padded and bool(weights.masks[bias][readers].all())


def _fold_(link: Link, weights: Weights, constants: Tensor) -> None:
    """bias += Σ weight·constant: of independent Gaussians the means add, and the variances times constant²."""
    weight, bias = join(link.target, "weight"), join(link.target, "bias")
    each = constants.repeat_interleave(link.spread)
    for moments, factor in ((weights.means, each), (weights.variances, each.square())):
        if weight in moments:
            by_input = moments[weight].reshape(*moments[weight].shape[:2], -1).sum(dim=2)
            moments[bias] = moments[bias] + by_input @ factor
    weights.folded.add(bias)


def chosen_entries(
    model: nn.Module, found: Iterable[Link], alive: Mapping[str, Tensor]
) -> dict[str, dict[int, Tensor]]:
    """For each tensor of the network that gets smaller: which entries of which dimensions stay."""
    chosen: dict[str, dict[int, Tensor]] = {}
    for link in found:
        stays = alive[link.source].nonzero().view(-1)
        norms = [s for s in link.steps if isinstance(s, str) and isinstance(model.get_submodule(s), NORMS)]
        for path in (link.source, *norms):
            module = model.get_submodule(path)
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and tensor.dim():
                    chosen.setdefault(join(path, key), {})[0] = stays
        inputs = alive[link.source].repeat_interleave(link.spread).nonzero().view(-1)
        chosen.setdefault(join(link.target, "weight"), {})[1] = inputs
    return chosen


def select(tensor: Tensor, dims: Mapping[int, Tensor]) -> Tensor:
    """The tensor with only some entries of some dimensions."""
    for dim, index in dims.items():
        tensor = tensor.index_select(dim, index.to(tensor.device))
    return tensor
