"""Node variables of a network: which layer has which, and how their values fold into its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from credo.core.errors import UnsupportedModelError
from credo.core.network.layer_hooks import covered_layers
from credo.core.network.layer_table import RULES
from credo.core.network.selection import join
from credo.core.network.substitute import aliases
from credo.core.support.name_patterns import chosen_names
from credo.methods.node.groups import Nodes


@dataclass(frozen=True)
class NodeLayer:
    """A layer and the indices of its variables in the vector of all: for inputs, for outputs, for its bias."""

    path: str
    inputs: slice | None
    outputs: slice | None
    bias: slice | None

    @property
    def span(self) -> slice:
        """All of its variables, which are contiguous."""
        own = [part for part in (self.inputs, self.outputs, self.bias) if part is not None]
        return slice(own[0].start, own[-1].stop)


def node_layers(model: nn.Module, given: Nodes) -> dict[str, NodeLayer]:
    """The node variables of the chosen Linear and Conv layers, by path.

    Layers whose weights are tied or computed from other parameters are left out: their scale could not be folded into
    one tensor.

    Args:
        model: The network.
        given: Which nodes of which layers have a scale.
    """
    side = given.side
    chosen = _chosen(model, given.layers)
    found: dict[str, NodeLayer] = {}
    end = 0
    for path, layer in chosen.items():
        inputs, outputs = layer_sizes(layer)
        has_bias = given.bias_scale and layer.bias is not None
        sizes = (inputs if side != "out" else 0, outputs if side != "in" else 0, int(has_bias))
        parts = []
        for size in sizes:
            parts.append(slice(end, end + size) if size else None)
            end += size
        found[path] = NodeLayer(path, *parts)
    return found


def layer_sizes(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs: units of a linear layer, channels of a convolution (all groups together)."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return int(layer.in_channels), int(layer.out_channels)  # type: ignore[arg-type]


def folded(model: nn.Module, nodes: Mapping[str, NodeLayer], values: Tensor) -> dict[str, Tensor]:
    """The layers' weights and biases scaled by the node values, by parameter name.

    Args:
        model: The network.
        nodes: Its layers with node variables, by path.
        values: One value for each variable, [nodes].
    """
    weights: dict[str, Tensor] = {}
    for path, node in nodes.items():
        layer = model.get_submodule(path)
        weight: Tensor = layer._parameters["weight"]  # type: ignore[assignment]
        own = values.to(weight.dtype)
        scale = None if node.inputs is None else _by_weight(layer, own[node.inputs], weight)
        if node.outputs is not None:
            out = own[node.outputs].view(-1, *[1] * (weight.dim() - 1))
            scale = out if scale is None else scale * out
        if scale is not None:
            weights[join(path, "weight")] = weight * scale
        bias: Tensor | None = layer._parameters["bias"]
        if bias is not None and (node.bias is not None or node.outputs is not None):
            for part in (node.bias, node.outputs):
                bias = bias if part is None else bias * own[part]
            weights[join(path, "bias")] = bias
    return weights


def _by_weight(layer: nn.Module, inputs: Tensor, weight: Tensor) -> Tensor:
    """One value for each input, as [1 or out, in/groups, 1, …]: outputs of a group depend on its inputs only."""
    trailing = [1] * (weight.dim() - 2)
    groups = int(getattr(layer, "groups", 1))
    if groups == 1:
        return inputs.view(1, -1, *trailing)
    return (
        inputs.view(groups, -1).repeat_interleave(weight.shape[0] // groups, dim=0).view(*weight.shape[:2], *trailing)
    )


def node_dtype(model: nn.Module, nodes: Mapping[str, NodeLayer]) -> torch.dtype:
    """The widest precision of the layers' weights, at least float32: half precision would lose steps of nodes."""
    widest = torch.float32
    for path in nodes:
        widest = torch.promote_types(widest, model.get_submodule(path).weight.dtype)  # type: ignore[arg-type]
    return widest


def _chosen(model: nn.Module, layers: str | Sequence[str]) -> dict[str, nn.Module]:
    tied = {name for group in aliases(model).values() if len(group) > 1 for name in group}
    possible = covered_layers(model, tied)
    if not possible:
        kinds = ", ".join(kind.__name__ for kind in RULES)
        raise UnsupportedModelError(
            f"{type(model).__name__} has no layer for node variables: they belong to {kinds} with weights of their own "
            "(not tied, not computed from other parameters)."
        )
    if layers == "all":
        return possible
    patterns = [layers] if isinstance(layers, str) else list(layers) if isinstance(layers, Sequence) else None
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f"nodes.layers={layers!r} must be 'all', or globs of layer paths such as {next(iter(possible))!r}."
        )
    if not patterns:
        raise ValueError(f"nodes.layers={layers} names no layer. Possible: {', '.join(possible)}, or 'all'.")
    return {path: possible[path] for path in chosen_names(possible, patterns, "layer or glob in nodes.layers")}
