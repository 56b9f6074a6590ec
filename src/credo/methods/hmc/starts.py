"""Where chains begin: an ensemble of short trainings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from credo.core.network.flat_layout import Layout
from credo.core.network.substitute import parameters_at
from credo.methods.hmc.potential import Potential

_LR = 0.01


def fresh_weights(model: nn.Module, layout: Layout, chains: int, seed: int) -> Tensor:
    """First weights of the chains, [chains, weights]: the network's own, then those of its layers' `reset_parameters`.

    Parameters of modules without `reset_parameters` are the network's own in every chain. torch's global generator is
    not advanced.

    Args:
        model: A network whose parameters may be overwritten.
        layout: The weights.
        chains: Number of chains.
        seed: Seed of the fresh weights.
    """
    own = parameters_at(model, layout.names)
    rows = [layout.flatten(own).detach()]
    named = dict(model.named_parameters())
    kept = {name: tensor.detach().clone() for name, tensor in named.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for _ in range(chains - 1):
            for module in resettable(model):
                module.reset_parameters()  # type: ignore[operator]
            rows.append(layout.flatten(own).detach())
        for name, tensor in named.items():
            tensor.copy_(kept[name])
    return torch.stack(rows)


def resettable(model: nn.Module) -> list[nn.Module]:
    """Modules that can draw first values of their own parameters."""
    return [module for module in model.modules() if callable(getattr(module, "reset_parameters", None))]


def without_fresh_start(model: nn.Module, layout: Layout) -> list[str]:
    """Names of the weights that start alike in every chain."""
    fresh = {id(p) for module in resettable(model) for p in module.parameters()}
    return [name for name, p in parameters_at(model, layout.names).items() if id(p) not in fresh]


def trained(energy: Potential, weights: Tensor, *, steps: int, learned: Sequence[nn.Parameter]) -> Tensor:
    """Weights of all chains after `steps` of Adam on U.

    Args:
        energy: U.
        weights: First weights, [chains, weights].
        steps: Number of steps over all data.
        learned: Parameters of `energy.likelihood`, which all chains share, to learn as well.
    """
    weights = weights.clone().requires_grad_()
    optimizer = torch.optim.Adam([weights, *learned], lr=_LR)
    for index in range(steps):
        weights.grad = energy(weights)[1]
        if learned:
            with torch.enable_grad():
                nll = energy.nll(weights.detach()).mean()
            for parameter, gradient in zip(learned, torch.autograd.grad(nll, learned, allow_unused=True), strict=True):
                parameter.grad = gradient
        # The last third comes to rest.
        optimizer.param_groups[0]["lr"] = _LR * min(1.0, 3.0 * (steps - index) / steps)
        optimizer.step()
    return weights.detach()
