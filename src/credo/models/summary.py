"""Numbers of weights and nodes (inputs of Linear and Conv layers) of a network."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from credo.core.support.keywords import checked_keywords

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class LayerSize:
    """One layer: path, type, number of parameters, inputs and outputs (channels of a convolution)."""

    path: str
    kind: str
    weights: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class OtherLayers:
    """Layers of one type that have weights but no nodes, such as normalisation."""

    kind: str
    count: int
    weights: int


@dataclass(frozen=True)
class Summary:
    """Sizes of a network.

    `weights` counts all parameters, also those of `others`; `nodes` the inputs of all Linear and Conv layers, which is
    the number of random variables per component of `credo.NodeBNN(side="in")` if it covers all of them (it leaves out
    tied layers and special types, such as the projections of attention).
    """

    name: str
    layers: tuple[LayerSize, ...]
    weights: int
    others: tuple[OtherLayers, ...] = ()

    @property
    def nodes(self) -> int:
        """Number of inputs of all layers."""
        return sum(layer.inputs for layer in self.layers)

    @property
    def ratio(self) -> float:
        """Weights per node."""
        return self.weights / self.nodes if self.nodes else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain containers."""
        sizes = {"weights": self.weights, "nodes": self.nodes, "ratio": self.ratio if self.nodes else None}
        listed = {"layers": [asdict(layer) for layer in self.layers], "others": [asdict(each) for each in self.others]}
        return {"name": self.name, **sizes, **listed}

    def __str__(self) -> str:
        rows = [("layer", "kind", "weights", "nodes")]
        rows += [(layer.path, layer.kind, f"{layer.weights:,}", f"{layer.inputs:,}") for layer in self.layers]
        rows += [("others", f"{each.count} {each.kind}", f"{each.weights:,}", "–") for each in self.others]
        first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
        lines = [f"{row[0]:{first}}  {row[1]:{second}}  {row[2]:>12}  {row[3]:>8}" for row in rows]
        end = f"{self.name}: {len(self.layers)} layers, {self.weights:,} weights, {self.nodes:,} nodes"
        return "\n".join([*lines, end + (f", {self.ratio:,.0f} weights per node" if self.nodes else "")])


@checked_keywords()
def summary(model: nn.Module) -> Summary:
    """Count layers, weights and nodes of a network; print the result or read its fields.

    A layer that is used several times counts once, and shared weights count for the first layer that has them. Works on
    the meta device, without memory for weights.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"summary needs a network, an nn.Module; got {type(model).__name__}.")
    spec: Any = getattr(model, "credo_spec", None)
    counted: set[int] = set()
    layers = tuple(_size(path, layer, counted) for path, layer in model.named_modules() if isinstance(layer, _KINDS))
    name = spec["name"] if spec else type(model).__name__
    return Summary(name, layers, sum(p.numel() for p in model.parameters()), _others(model))


def _others(model: nn.Module) -> tuple[OtherLayers, ...]:
    """Return the layers with parameters that no Linear or Conv layer has."""
    listed = {id(p) for layer in model.modules() if isinstance(layer, _KINDS) for p in layer.parameters()}
    found: dict[str, list[int]] = {}
    for layer in model.modules():
        own = [p.numel() for p in layer.parameters(recurse=False) if id(p) not in listed]
        if own:
            found.setdefault(type(layer).__name__, []).append(sum(own))
    return tuple(OtherLayers(kind, len(sizes), sum(sizes)) for kind, sizes in found.items())


def _size(path: str, layer: nn.Module, counted: set[int]) -> LayerSize:
    linear = isinstance(layer, nn.Linear)
    inputs, outputs = (getattr(layer, f"{side}_{'features' if linear else 'channels'}") for side in ("in", "out"))
    own = [p for p in layer.parameters() if id(p) not in counted]
    counted.update(id(p) for p in own)
    weights = sum(p.numel() for p in own)
    return LayerSize(path, type(layer).__name__, weights, int(inputs), int(outputs))
