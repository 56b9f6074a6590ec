"""Before the first step of a node-based BNN: choices checked, first values, and an optimiser with two groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.errors import unknown
from credo.core.network.flat_layout import inverse_softplus
from credo.core.optimizer_step import Descent, OptimizerChoice, plain_name, trainable
from credo.methods.node.elbo_terms import KINDS
from credo.methods.node.layers import NodeLayer, node_dtype

NOISES = ("example", "batch")
_NODES = ("loc", "rho")
# First deviations are normal around `std_init`, with this share of it.
_STD_SPREAD, _LEAST_STD = 0.1, 1e-6


def check_choices(
    noise: str, kl: str, gamma: float, positive: Mapping[str, float], others: Mapping[str, float]
) -> None:
    """Refuse names that do not exist and numbers that cannot be."""
    if noise not in NOISES:
        raise ValueError(unknown("noise", str(noise), NOISES))
    if kl not in KINDS:
        raise ValueError(unknown("kl", str(kl), KINDS))
    for name, value in {**positive, **others, "gamma": gamma}.items():
        if not isinstance(value, Real):
            raise ValueError(f"{name}={value!r} must be a number.")
        if not (math.isfinite(value) and value >= 0) or (name in positive and value == 0):
            least = "positive" if name in positive else "not negative"
            raise ValueError(f"{name}={value} must be finite and {least}.")
    if gamma and "bound" not in kl:
        raise ValueError(f"gamma={gamma} weighs the entropy, which kl={kl!r} does not have: use kl='bound'.")


def initial_nodes(
    model: nn.Module,
    nodes: Mapping[str, NodeLayer],
    components: int,
    spread: float,
    std_init: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """First means N(1, spread²) and ρ of deviations near `std_init`, each [components, nodes]."""
    shape = (2, components, max(node.span.stop for node in nodes.values()))
    noise = torch.randn(shape, generator=generator, device=generator.device, dtype=node_dtype(model, nodes))
    std = (std_init * (1 + _STD_SPREAD * noise[1])).abs().clamp_min(_LEAST_STD)
    return 1 + spread * noise[0], inverse_softplus(std)


def node_descent(
    posterior: nn.Module,
    optimizer: OptimizerChoice | None,
    lr: float,
    node_lr: float | None,
    options: Mapping[str, Any] | None,
    node_options: Mapping[str, Any] | None,
    clip_norm: float | None,
) -> Descent:
    """Descent on all parameters of a posterior whose own are `loc` and `rho`; these have no weight decay.

    An optimiser that is given as a function keeps the groups it makes, and its rates.
    """
    rate = lr if node_lr is None else node_lr
    if not isinstance(rate, Real) or not 0 <= rate < math.inf:
        name = "lr" if node_lr is None else "node_lr"
        raise ValueError(f"{name}={rate!r} must be a finite number, 0 or more.")
    if "lr" in (node_options or {}):
        raise ValueError("node_options: the nodes' rate is given by node_lr.")
    if callable(optimizer) and (node_lr is not None or node_options):
        raise ValueError("node_lr and node_options are for optimisers by name; a function gives its groups their own.")
    own = trainable(posterior)
    # Weights first: messages name the first parameter that is wrong.
    parameters = {n: p for n, p in own.items() if n not in _NODES} | {n: p for n, p in own.items() if n in _NODES}
    descent = Descent(parameters, optimizer, lr, options, clip_norm, locate=_located)
    if not isinstance(optimizer, str):
        return descent
    nodes = [parameters[name] for name in _NODES]
    if optimizer == "sgd":
        # A component sees 1/K of the examples. Adaptive optimisers undo that by themselves.
        rate *= len(nodes[0])
    made = descent.optimizer
    for group in made.param_groups:
        group["params"] = [p for p in group["params"] if not any(p is node for node in nodes)]
    made.param_groups = [group for group in made.param_groups if group["params"]]
    given = {"weight_decay": 0.0} if "weight_decay" in made.defaults else {}
    given |= dict(node_options or {})
    strangers = sorted(set(given) - set(made.defaults))
    if strangers:
        raise ValueError(f"node_options: {optimizer} has no option {', '.join(strangers)}.")
    try:
        type(made)(nodes, **{**(options or {}), **given, "lr": rate})  # a group that is added is not checked
        made.add_param_group({"params": nodes, **given, "lr": rate})
    except (TypeError, ValueError) as error:
        raise ValueError(f"node_options={dict(node_options or {})}: {error}.") from error
    made.param_groups[-1]["initial_lr"] = rate
    return descent


def _located(name: str, tensor: Tensor) -> str:
    described = {"loc": "the nodes' means", "rho": "the nodes' deviations"}
    return described.get(name, plain_name(name))
