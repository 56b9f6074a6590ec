"""Removable units: trace the network for layers whose outputs exactly one other layer uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from credo.core.errors import UnsupportedModelError
from credo.core.network.selection import join
from credo.core.network.substitute import aliases

LAYERS = (nn.Linear, nn.Conv2d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.Softplus, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.Sigmoid)
# Layers that treat channels separately and map constants to constants.
_SAME = (nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Dropout, nn.Dropout2d, nn.Identity)
_FUNCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    F.relu: F.relu,
    torch.relu: torch.relu,
    torch.tanh: torch.tanh,
    torch.sigmoid: torch.sigmoid,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Connection:
    """A layer, the elementwise steps after it, and the only layer that uses its outputs.

    Attributes:
        source: Path of the layer.
        steps: Paths of norms and activations, or functions, in between.
        target: Path of the layer that uses the outputs.
        fan_out: Inputs of `target` for each output of `source`: more than one if images are flattened.
    """

    source: str
    steps: tuple[str | Callable[[Tensor], Tensor], ...]
    target: str
    fan_out: int


def connections(model: nn.Module) -> list[Connection]:
    """All connections of a network, in order; outputs that are added, returned or used twice have none."""
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # the user's forward runs inside, on proxies, and raises what it likes
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be traced ({error}), so its units cannot be removed. "
            "Prune single weights and keep the network's size."
        ) from error
    usable = _usable_layers(model, graph)
    nodes = [node for node in graph.nodes if node.op == "call_module" and node.target in usable]
    found = (_follow(node, dict(model.named_modules()), usable) for node in nodes)
    return [connection for connection in found if connection is not None]


def _usable_layers(model: nn.Module, graph: fx.Graph) -> set[str]:
    """Paths of layers and norms that run once and share no parameters."""
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    tied = {name for group in aliases(model).values() if len(group) > 1 for name in group}
    return {
        path
        for path, module in model.named_modules()
        if type(module) in (*LAYERS, *NORMS)
        and getattr(module, "groups", 1) == 1
        and calls.count(path) == 1
        and path not in read
        and not any(join(path, key) in tied for key in module._parameters)
    }


def _follow(node: fx.Node, modules: dict[str, nn.Module], usable: set[str]) -> Connection | None:
    source, flattened = str(node.target), False
    steps: list[str | Callable[[Tensor], Tensor]] = []
    while len(node.users) == 1:
        (node,) = node.users
        if len(node.all_input_nodes) != 1 or node.op == "output":
            return None
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if type(module) in LAYERS:
            return _connection(source, tuple(steps), str(node.target), flattened, modules, usable)
        if _is_flatten(node, module):
            flattened = True
        elif type(module) in _ACTIVATIONS or (str(node.target) in usable and _has_statistics(module)):
            steps.append(str(node.target))
        elif node.target in _FUNCTIONS and node.op in ("call_function", "call_method"):
            steps.append(_FUNCTIONS[node.target])
        elif not (type(module) in _SAME or (type(module) is nn.AvgPool2d and module.padding in (0, (0, 0)))):
            return None
    return None


def _connection(
    source: str, steps: tuple[Any, ...], target: str, flattened: bool, modules: dict[str, nn.Module], usable: set[str]
) -> Connection | None:
    if target not in usable:
        return None
    first, second = modules[source], modules[target]
    outputs, inputs = _weight(first).shape[0], _weight(second).shape[1]
    alike = type(first) is type(second) and inputs == outputs
    images = type(first) is nn.Conv2d and type(second) is nn.Linear and flattened and inputs % outputs == 0
    if not (alike or images) or (flattened and type(second) is nn.Conv2d):
        return None
    return Connection(source, steps, target, inputs // outputs)


def _weight(layer: nn.Module) -> Tensor:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight


def _has_statistics(module: nn.Module | None) -> bool:
    return isinstance(module, NORMS) and module.running_mean is not None


def _is_flatten(node: fx.Node, module: nn.Module | None) -> bool:
    if isinstance(module, nn.Flatten):
        return (module.start_dim, module.end_dim) == (1, -1)
    if node.target is not torch.flatten and (node.op, node.target) != ("call_method", "flatten"):
        return False
    given: Any = (*node.args[1:], *node.kwargs.values())
    return bool(given == (1,) and {*node.kwargs} <= {"start_dim"})
