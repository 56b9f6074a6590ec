"""How many weights a network has, and how many nodes: inputs of its Linear and Conv layers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class LayerSize:
    """One layer: its path in the network, its type, its parameters, and its inputs and outputs (channels of a conv)."""

    path: str
    kind: str
    weights: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class OtherLayers:
    """The layers of one type that have weights but no nodes, such as normalisation: how many, and their parameters."""

    kind: str
    count: int
    weights: int


@dataclass(frozen=True)
class Summary:
    """The sizes of a network.

    `weights` are all parameters, also those of `others`; `nodes` the inputs of all Linear and Conv layers together,
    which is the number of random variables of `credo.NodeBNN(side="in")` for one component, if it covers all of them
    (it leaves out tied layers and kinds of its own, such as attention's projections).
    """

    name: str
    layers: tuple[LayerSize, ...]
    weights: int
    others: tuple[OtherLayers, ...] = ()

    @property
    def nodes(self) -> int:
        """Inputs of all layers."""
        return sum(layer.inputs for layer in self.layers)

    @property
    def ratio(self) -> float:
        """Weights for each node."""
        return self.weights / self.nodes if self.nodes else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON-able."""
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
        return "\n".join([*lines, end + (f", {self.ratio:,.0f} weights a node" if self.nodes else "")])


def summary(model: nn.Module) -> Summary:
    """Layers, weights and nodes of a network; `print` it, or read its fields.

    A layer that is used at several places counts once, and weights that layers share are the first one's. Works on the
    meta device, without memory for weights.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"summary needs a network, an nn.Module; got {type(model).__name__}.")
    spec: Any = getattr(model, "credo_spec", None)
    counted: set[int] = set()
    layers = tuple(_size(path, layer, counted) for path, layer in model.named_modules() if isinstance(layer, _KINDS))
    name = spec["name"] if spec else type(model).__name__
    return Summary(name, layers, sum(p.numel() for p in model.parameters()), _others(model))


def _others(model: nn.Module) -> tuple[OtherLayers, ...]:
    """All that has parameters which no Linear or Conv layer has."""
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
