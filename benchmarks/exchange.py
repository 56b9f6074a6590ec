"""How many bytes each method gives to the exchange of a step, from the shapes of a network alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from credo.core.network.layer_table import RULES

SCALAR = 4
"""Bytes of an entry: single precision."""


@dataclass(frozen=True)
class Exchange:
    """Entries that a process gives to a step's exchange.

    `numbers` are losses, and a flag for each gradient that might be missing.
    """

    gradients: int
    curvatures: int
    numbers: int

    def size(self, *, compress: bool = False) -> int:
        """Bytes; rounded to bfloat16 an entry has 2, while numbers are then doubles."""
        entries = self.gradients + self.curvatures
        return 2 * entries + 8 * self.numbers if compress else SCALAR * (entries + self.numbers)


def exchange_of(method: str, model: nn.Module) -> Exchange:
    """What one step of a method exchanges on this network, with the method's defaults.

    Not what synchronised BatchNorm adds, nor ascents on draws that processes share.
    """
    if method not in _EXCHANGES:
        raise ValueError(f"No exchange is known for {method!r}; possible: {', '.join(_EXCHANGES)}.")
    return _EXCHANGES[method](model)


def _weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _tensors(model: nn.Module) -> int:
    return sum(p.requires_grad for p in model.parameters())


def _point(model: nn.Module) -> Exchange:
    """One gradient a weight."""
    return Exchange(_weights(model), 0, 2 + _tensors(model))


def _mean_field(model: nn.Module) -> Exchange:
    """Gradients of mean and standard deviation; the affine parameters of BatchNorm are points."""
    points = [p for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) for p in m.parameters()]
    random = _weights(model) - sum(p.numel() for p in points)
    # The standard deviations are one long vector.
    return Exchange(_weights(model) + random, 0, 2 + _tensors(model) + 1)


def _nodes(model: nn.Module, components: int = 4) -> Exchange:
    """Gradients of weights, and of means and standard deviations of a node for each input of a layer."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    nodes = sum(m.in_features if isinstance(m, nn.Linear) else m.in_channels for m in layers)
    return Exchange(_weights(model) + 2 * components * nodes, 0, 1 + _tensors(model) + 2)


def _squares(model: nn.Module) -> Exchange:
    """A gradient and a square a weight."""
    return Exchange(_weights(model), _weights(model), 1)


def _kronecker(model: nn.Module) -> Exchange:
    """Gradients, two square factors a layer, and squares for all parameters without factors."""
    entries = covered = 0
    for layer in model.modules():
        if type(layer) in RULES and isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            outputs = layer.weight.shape[0]
            inputs = layer.weight.numel() // outputs + (layer.bias is not None)
            entries += inputs**2 + outputs**2
            covered += inputs * outputs
    return Exchange(_weights(model), entries + _weights(model) - covered, 1)


_EXCHANGES: dict[str, Callable[[nn.Module], Exchange]] = {
    "map": _point,
    "mc-dropout": _point,
    "bbb": _mean_field,
    "bbb-adversarial": _mean_field,
    "node-bnn": _nodes,
    "vogn": _squares,
    "ogn": _squares,
    "ivon": _squares,
    "kfac": _kronecker,
    "noisy-kfac": _kronecker,
}
METHODS = tuple(_EXCHANGES)
