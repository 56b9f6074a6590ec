"""Choose a structure of the curvature by name, if there is memory for it."""

from __future__ import annotations

import torch
from torch import nn

from credo.core.errors import UnsupportedModelError
from credo.core.kronecker.factors import matrix_shape
from credo.core.kronecker.layer_rules import kronecker_layers
from credo.core.network.flat_layout import Layout
from credo.core.network.substitute import aliases
from credo.core.support.memory import available_bytes
from credo.methods.laplace.kronecker import Kronecker
from credo.methods.laplace.last_layer import LastLayer
from credo.methods.laplace.low_rank import LowRank
from credo.methods.laplace.structures import Diagonal, Full, Structure

STRUCTURES = ("kron", "diag", "full", "low-rank")
_ADVICE = {
    "kron": "structure='diag', or random='last' for the last layer alone",
    "diag": "random='last' for the last layer alone",
    "full": "structure='kron', or random='last' for the last layer alone",
    "low-rank": "a smaller rank, structure='kron', or random='last' for the last layer alone",
}


def make_structure(
    name: str, model: nn.Module, layout: Layout, last: LastLayer | None, device: torch.device, rank: int
) -> Structure:
    """The structure of that name, zero.

    Args:
        name: One of `STRUCTURES`.
        model: The network.
        layout: The random weights.
        last: The last layer, if they are its own.
        device: Where they are.
        rank: Eigenpairs of `"low-rank"`.
    """
    needed, available = _needed_bytes(name, model, layout, rank), available_bytes(device)
    if needed > available:
        raise UnsupportedModelError(
            f"structure={name!r} of {layout.size:,} random weights needs about {needed / 1e9:,.1f} GB, and "
            f"{available / 1e9:,.1f} GB are free: try {_ADVICE[name]}."
        )
    if name == "kron":
        return Kronecker(model, layout, last, device)
    if name == "low-rank":
        return LowRank(layout, last, device, rank)
    return {"diag": Diagonal, "full": Full}[name](layout, last, device)


def _needed_bytes(name: str, model: nn.Module, layout: Layout, rank: int) -> float:
    """About the memory of the structure, of its sums in a pass, and of finding its root."""
    size = layout.size
    if name == "full":
        return 4 * 8.0 * size**2
    if name != "kron":
        return 4.0 * size * layout.dtype.itemsize * (3 * rank if name == "low-rank" else 1)
    layers = kronecker_layers(model, layout.names, layout.names, aliases(model))
    shapes = [matrix_shape(layer.layer, bias=layer.bias is not None) for layer in layers]
    return 4 * 8.0 * sum(groups * (outputs**2 + inputs**2) for groups, outputs, inputs in shapes)
