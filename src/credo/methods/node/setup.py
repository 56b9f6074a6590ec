"""Construction of a node-based BNN: initial values, and an optimiser with groups of its own for the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from credo.core.network.flat_layout import inverse_softplus
from credo.core.optimizer_step import OptimizerStep, plain_name
from credo.core.optimizers import Optimizer, Rates, rates_by_name
from credo.methods.node.groups import NodeInit
from credo.methods.node.layers import NodeLayer, node_dtype

# First deviations are normal around `init.std`, with this fraction of it as their std.
_STD_SPREAD, _LEAST_STD = 0.1, 1e-6


def initial_nodes(
    model: nn.Module,
    nodes: Mapping[str, NodeLayer],
    components: int,
    init: NodeInit,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """First means N(1, init.spread²) and ρ of deviations near `init.std`, each [components, nodes].

    Args:
        model: The network.
        nodes: Its layers with node variables, by path.
        components: Number of components.
        init: Standard deviation of the means around 1, and the typical one of a node.
        generator: Source of random numbers.
    """
    shape = (2, components, max(node.span.stop for node in nodes.values()))
    noise = torch.randn(shape, generator=generator, device=generator.device, dtype=node_dtype(model, nodes))
    std = (init.std * (1 + _STD_SPREAD * noise[1])).abs().clamp_min(_LEAST_STD)
    return 1 + init.spread * noise[0], inverse_softplus(std)


def node_optimizer_step(
    weights: Mapping[str, nn.Parameter], nodes: Mapping[str, nn.Parameter], optimizer: Optimizer, lr: Rates
) -> OptimizerStep:
    """The optimiser of weights and nodes, each with a rate and options of its own.

    Args:
        weights: All other parameters, by name.
        nodes: The parameters of the nodes by name, which have no weight decay.
        optimizer: The optimiser; its option `nodes` has options for the nodes alone.
        lr: Learning rate, or rates by name.
    """
    options = dict(optimizer.options)
    own_options = options.pop("nodes", {})
    if not isinstance(own_options, Mapping):
        raise ValueError(f"optimizer.nodes={own_options!r:.80} must be a mapping such as {{'momentum': 0.5}}.")
    if "lr" in own_options:
        raise ValueError("optimizer.nodes: the nodes' rate is given by lr={'nodes.*': …, '*': …}.")
    # Weights first: messages name the first parameter that is not finite.
    step = OptimizerStep({**weights, **nodes}, replace(optimizer, options=options), lr, locate=_located)
    name, made = optimizer.name, step.optimizer
    if not isinstance(name, str):
        return step
    own = {id(node) for node in nodes.values()}
    rates = rates_by_name(lr, [plain_name(name) for name in (*weights, *nodes)])
    # A component sees 1/K of the examples. Adaptive optimisers undo that by themselves.
    factor = len(next(iter(nodes.values()))) if name == "sgd" else 1
    for group in made.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in own]
    made.param_groups = [group for group in made.param_groups if group["params"]]
    given = {"weight_decay": 0.0} if "weight_decay" in made.defaults else {}
    given |= dict(own_options)
    unknown_options = sorted(set(given) - set(made.defaults))
    if unknown_options:
        raise ValueError(f"optimizer.nodes: {name} has no option {', '.join(unknown_options)}.")
    by_rate: dict[float, list[nn.Parameter]] = {}
    for key, parameter in nodes.items():
        by_rate.setdefault(factor * rates[key], []).append(parameter)
    for rate, parameters in by_rate.items():
        try:
            type(made)(parameters, **{**options, **given, "lr": rate})  # a group that is added is not checked
            made.add_param_group({"params": parameters, **given, "lr": rate})
        except (TypeError, ValueError) as error:
            raise ValueError(f"optimizer.nodes={dict(own_options)}: {error}.") from error
        made.param_groups[-1]["initial_lr"] = rate
    return step


def _located(name: str, tensor: Tensor) -> str:
    described = {"nodes.loc": "the nodes' means", "nodes.rho": "the nodes' deviations"}
    return described.get(name, plain_name(name))
