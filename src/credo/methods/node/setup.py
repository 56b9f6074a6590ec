"""Construction of a node-based BNN: validation, initial values, and an optimiser with two groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.errors import unknown
from credo.core.network.flat_layout import inverse_softplus
from credo.core.optimizer_step import OptimizerStep, plain_name
from credo.core.optimizers import OptimizerChoice
from credo.methods.node.elbo_terms import KINDS
from credo.methods.node.layers import NodeLayer, node_dtype

NOISES = ("example", "batch")
# First deviations are normal around `std_init`, with this fraction of it as their std.
_STD_SPREAD, _LEAST_STD = 0.1, 1e-6


def check_choices(
    noise: str, kl: str, gamma: float, positive: Mapping[str, float], others: Mapping[str, float]
) -> None:
    """Raise ValueError for unknown names and numbers out of range.

    Args:
        noise: A name of `NOISES`.
        kl: A name of `KINDS`.
        gamma: Factor on the additional entropy.
        positive: Arguments that must be positive, by name.
        others: Arguments that must not be negative, by name.
    """
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
    """First means N(1, spread²) and ρ of deviations near `std_init`, each [components, nodes].

    Args:
        model: The network.
        nodes: Its layers with node variables, by path.
        components: Number of components.
        spread: Standard deviation of the means around 1.
        std_init: Typical standard deviation of a node.
        generator: Source of random numbers.
    """
    shape = (2, components, max(node.span.stop for node in nodes.values()))
    noise = torch.randn(shape, generator=generator, device=generator.device, dtype=node_dtype(model, nodes))
    std = (std_init * (1 + _STD_SPREAD * noise[1])).abs().clamp_min(_LEAST_STD)
    return 1 + spread * noise[0], inverse_softplus(std)


def node_optimizer_step(
    weights: Mapping[str, nn.Parameter],
    nodes: Mapping[str, nn.Parameter],
    optimizer: OptimizerChoice | None,
    lr: float,
    node_lr: float | None,
    options: Mapping[str, Any] | None,
    node_options: Mapping[str, Any] | None,
    clip_norm: float | None,
) -> OptimizerStep:
    """The optimiser of weights and nodes, each with a rate and options of its own.

    Args:
        weights: All other parameters, by name.
        nodes: The parameters `loc` and `rho` of the nodes, which have no weight decay.
        optimizer: A name of `OPTIMIZERS`, a function that makes the groups and their rates itself, or None.
        lr: Learning rate of the weights.
        node_lr: Learning rate of the nodes; None: `lr`.
        options: Further arguments of the optimiser.
        node_options: The same for the nodes.
        clip_norm: Largest norm of the gradient over all parameters; None: no clipping.
    """
    rate = lr if node_lr is None else node_lr
    if not isinstance(rate, Real) or not 0 <= rate < math.inf:
        name = "lr" if node_lr is None else "node_lr"
        raise ValueError(f"{name}={rate!r} must be a finite number, 0 or more.")
    if "lr" in (node_options or {}):
        raise ValueError("node_options: the nodes' rate is given by node_lr.")
    if callable(optimizer) and (node_lr is not None or node_options):
        raise ValueError("node_lr and node_options are for optimisers by name; a function gives its groups their own.")
    # Weights first: messages name the first parameter that is not finite.
    step = OptimizerStep({**weights, **nodes}, optimizer, lr, options, clip_norm, locate=_located)
    if not isinstance(optimizer, str):
        return step
    own = [*nodes.values()]
    if optimizer == "sgd":
        # A component sees 1/K of the examples. Adaptive optimisers undo that by themselves.
        rate *= len(own[0])
    made = step.optimizer
    for group in made.param_groups:
        group["params"] = [p for p in group["params"] if not any(p is node for node in own)]
    made.param_groups = [group for group in made.param_groups if group["params"]]
    given = {"weight_decay": 0.0} if "weight_decay" in made.defaults else {}
    given |= dict(node_options or {})
    unknown_options = sorted(set(given) - set(made.defaults))
    if unknown_options:
        raise ValueError(f"node_options: {optimizer} has no option {', '.join(unknown_options)}.")
    try:
        type(made)(own, **{**(options or {}), **given, "lr": rate})  # a group that is added is not checked
        made.add_param_group({"params": own, **given, "lr": rate})
    except (TypeError, ValueError) as error:
        raise ValueError(f"node_options={dict(node_options or {})}: {error}.") from error
    made.param_groups[-1]["initial_lr"] = rate
    return step


def _located(name: str, tensor: Tensor) -> str:
    described = {"loc": "the nodes' means", "rho": "the nodes' deviations"}
    return described.get(name, plain_name(name))
