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
class Summary:
    """The sizes of a network.

    `weights` are all parameters, also those of other layers; `nodes` the inputs of all Linear and Conv layers together,
    which is the number of random variables of `credo.NodeBNN(side="in")` for one component.
    """

    name: str
    layers: tuple[LayerSize, ...]
    weights: int

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
        return {"name": self.name, **sizes, "layers": [asdict(layer) for layer in self.layers]}

    def __str__(self) -> str:
        widths = [max((len(layer.path) for layer in self.layers), default=5), 8]
        lines = [f"{'layer':{widths[0]}}  {'kind':{widths[1]}}  {'weights':>12}  {'nodes':>8}"]
        lines += [
            f"{layer.path:{widths[0]}}  {layer.kind:{widths[1]}}  {layer.weights:>12,}  {layer.inputs:>8,}"
            for layer in self.layers
        ]
        end = f"{self.name}: {len(self.layers)} layers, {self.weights:,} weights, {self.nodes:,} nodes"
        return "\n".join([*lines, end + (f", {self.ratio:,.0f} weights a node" if self.nodes else "")])


def summary(model: nn.Module) -> Summary:
    """Layers, weights and nodes of a network; `print` it, or read its fields.

    A layer that is used at several places counts once. Works on the meta device, without memory for weights.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"summary needs a network, an nn.Module; got {type(model).__name__}.")
    spec: Any = getattr(model, "credo_spec", None)
    layers = tuple(_size(path, layer) for path, layer in model.named_modules() if isinstance(layer, _KINDS))
    name = spec["name"] if spec else type(model).__name__
    return Summary(name, layers, sum(p.numel() for p in model.parameters()))


def _size(path: str, layer: nn.Module) -> LayerSize:
    linear = isinstance(layer, nn.Linear)
    inputs, outputs = (getattr(layer, f"{side}_{'features' if linear else 'channels'}") for side in ("in", "out"))
    weights = sum(p.numel() for p in layer.parameters())
    return LayerSize(path, type(layer).__name__, weights, int(inputs), int(outputs))
