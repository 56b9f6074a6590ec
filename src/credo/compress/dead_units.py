"""Dead units: all their incoming or all their outgoing weights are pruned.

Without incoming weights a unit outputs a constant, act(bias), which is folded into the next layer's bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from credo.compress.structure import NORMS, Connection
from credo.core.network.selection import join


@dataclass
class Weights:
    """Means of all parameters, variances of random ones, and pruning masks; changed by `remove_dead_`.

    `folded` are biases that constants were folded into.
    """

    means: dict[str, Tensor]
    variances: dict[str, Tensor]
    masks: dict[str, Tensor]
    folded: set[str]


def remove_dead_(model: nn.Module, found: Iterable[Connection], weights: Weights) -> dict[str, Tensor]:
    """Prune dead units of `model`, of its connections `found`, in `weights`; returns masks of the others by layer.

    A unit remains if its constant is random (its bias is) or cannot be folded exactly: into a padded convolution, whose
    borders see zeros instead of it, or into a layer without a bias of the same kind. So does one unit of every layer.
    """
    found = list(found)
    alive = {
        connection.source: torch.ones(len(weights.means[join(connection.source, "weight")]), dtype=torch.bool)
        for connection in found
    }
    changed = True
    while changed:  # a unit may die because its inputs do
        changed = False
        for connection in found:
            dead = _dead(model, connection, weights) & alive[connection.source]
            if bool(dead.any()):
                alive[connection.source] &= ~dead
                changed = True
    for mask in alive.values():
        mask[0] |= not bool(mask.any())
    return alive


def _dead(model: nn.Module, connection: Connection, weights: Weights) -> Tensor:
    """Mask of removable units; their constants are folded, and their weights pruned on both sides."""
    name, reader = join(connection.source, "weight"), join(connection.target, "weight")
    units = len(weights.masks[name])
    used = weights.masks[reader].transpose(0, 1).reshape(units, -1)
    unused = ~used.any(dim=1).cpu()
    constant = _constants(model, connection, weights)
    no_inputs = ~weights.masks[name].reshape(units, -1).any(dim=1).cpu() & constant.isfinite().cpu() & ~unused
    nonzero = no_inputs & (constant != 0).cpu()
    if bool(nonzero.any()):
        if _can_fold(model, connection, weights, nonzero):
            _fold_(connection, weights, torch.where(nonzero.to(constant.device), constant, torch.zeros_like(constant)))
        else:
            no_inputs &= ~nonzero
    dead = unused | no_inputs
    for key in (name, join(connection.source, "bias")):
        if key in weights.masks:
            weights.masks[key][dead] = False
    weights.masks[reader][:, dead.repeat_interleave(connection.fan_out)] = False
    return dead


def _constants(model: nn.Module, connection: Connection, weights: Weights) -> Tensor:
    """Output of each unit without inputs, in eval mode; NaN if it is random."""
    means = weights.means
    units = len(means[join(connection.source, "weight")])
    values = means.get(
        join(connection.source, "bias"), means[join(connection.source, "weight")].new_zeros(units)
    ).clone()
    values[_is_random(join(connection.source, "bias"), weights, units)] = torch.nan
    for step in connection.steps:
        module: Any = model.get_submodule(step) if isinstance(step, str) else step
        if not isinstance(module, NORMS):
            values = module(values)
            continue
        assert module.running_mean is not None  # norms without statistics are no steps
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


def _can_fold(model: nn.Module, connection: Connection, weights: Weights, units: Tensor) -> bool:
    target: Any = model.get_submodule(connection.target)
    bias, weight = join(connection.target, "bias"), join(connection.target, "weight")
    if target.bias is None or (weight in weights.variances) > (bias in weights.variances):
        return False
    padded = isinstance(target, nn.Conv2d) and target.padding not in (0, (0, 0), "valid")
    readers = weights.masks[weight][:, units.repeat_interleave(connection.fan_out)].flatten(1).any(dim=1)
    return not padded and bool(weights.masks[bias][readers].all())


def _fold_(connection: Connection, weights: Weights, constants: Tensor) -> None:
    """bias += Σ weight·constant: means of independent Gaussians add, and so do variances times constant²."""
    weight, bias = join(connection.target, "weight"), join(connection.target, "bias")
    each = constants.repeat_interleave(connection.fan_out)
    for moments, factor in ((weights.means, each), (weights.variances, each.square())):
        if weight in moments:
            by_input = moments[weight].reshape(*moments[weight].shape[:2], -1).sum(dim=2)
            moments[bias] = moments[bias] + by_input @ factor
    weights.folded.add(bias)


def chosen_entries(
    model: nn.Module, found: Iterable[Connection], alive: Mapping[str, Tensor]
) -> dict[str, dict[int, Tensor]]:
    """Indices to keep, by dimension, of tensors of `model`: those of units `alive`, with connections `found`."""
    chosen: dict[str, dict[int, Tensor]] = {}
    for connection in found:
        stays = alive[connection.source].nonzero().view(-1)
        norms = [s for s in connection.steps if isinstance(s, str) and isinstance(model.get_submodule(s), NORMS)]
        for path in (connection.source, *norms):
            module = model.get_submodule(path)
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and tensor.dim():
                    chosen.setdefault(join(path, key), {})[0] = stays
        inputs = alive[connection.source].repeat_interleave(connection.fan_out).nonzero().view(-1)
        chosen.setdefault(join(connection.target, "weight"), {})[1] = inputs
    return chosen


def select(tensor: Tensor, dims: Mapping[int, Tensor]) -> Tensor:
    """Select entries of a tensor by `{dimension: indices}`."""
    for dim, index in dims.items():
        tensor = tensor.index_select(dim, index.to(tensor.device))
    return tensor
