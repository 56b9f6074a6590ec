"""Validate the arguments of Laplace, and make the structure of its curvature if there is memory for it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from credo.core.errors import UnsupportedModelError, unknown
from credo.core.kronecker.factors import matrix_shape
from credo.core.kronecker.layer_rules import kronecker_layers
from credo.core.likelihood import Likelihood
from credo.core.network.flat_layout import Layout
from credo.core.network.skeleton import private_network
from credo.core.network.substitute import aliases
from credo.core.per_example.plan import PerExamplePlan
from credo.core.support.memory import available_bytes
from credo.core.support.validate import is_number
from credo.methods.kfac.sampled_fisher import check_can_sample
from credo.methods.laplace.kronecker import Kronecker
from credo.methods.laplace.last_layer import LastLayer
from credo.methods.laplace.low_rank import LowRank
from credo.methods.laplace.output_curvature import CURVATURES
from credo.methods.laplace.structures import Diagonal, Full, Structure

STRUCTURES = ("kron", "diag", "full", "low-rank")
_ADVICE = {
    "kron": "structure='diag', or random='last' for the last layer alone",
    "diag": "random='last' for the last layer alone",
    "full": "structure='kron', or random='last' for the last layer alone",
    "low-rank": "a smaller rank, structure='kron', or random='last' for the last layer alone",
}


def check_choices(structure: str, curvature: str, temperature: Any, likelihood: Likelihood) -> None:
    """Raise ValueError for arguments of `Laplace` that are not possible.

    Args:
        structure: One of `STRUCTURES`.
        curvature: One of `CURVATURES`.
        temperature: A positive number.
        likelihood: Which must be able to draw labels for `"sampled"`.
    """
    if structure not in STRUCTURES:
        raise ValueError(unknown("structure", str(structure), STRUCTURES))
    if curvature not in CURVATURES:
        raise ValueError(unknown("curvature", str(curvature), CURVATURES))
    if not is_number(temperature) or not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature!r} must be a positive number; 1 is the posterior itself.")
    if curvature == "sampled":
        check_can_sample(likelihood)


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
    if name in ("kron", "diag") and last is None:
        _check_squares(name, model, layout)
    if name == "kron":
        return Kronecker(model, layout, last, device)
    if name == "low-rank":
        return LowRank(layout, last, device, rank)
    return {"diag": Diagonal, "full": Full}[name](layout, last, device)


def _check_squares(name: str, model: nn.Module, layout: Layout) -> None:
    """Raise UnsupportedModelError at once for a network whose squared gradients the pass would not find."""
    layers = kronecker_layers(model, layout.names, layout.names, aliases(model)) if name == "kron" else []
    covered = {each for layer in layers for each in layer.names}
    others = [each for each in layout.names if each not in covered]
    net = private_network(model)
    if others and net is not model:
        PerExamplePlan(net.eval(), others)


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
