"""One training step of each contender: plain Adam, and the methods of Credo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks import DATA_SIZE
from credo import METHODS, Posterior
from credo.priors import ScaleMixture

Step = Callable[[Tensor, Tensor], object]
"""Forward, backward and update on one batch."""

BuildStep = Callable[[nn.Module], Step]

ADAM = "Adam"
REFERENCES = ("Adam again", "Adam, fused", "AdamW, fused")
"""Rows that are no method. The first is the noise of the measurement: a ratio closer to 1 than this one is 1."""

_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "mc-dropout": ("mc-dropout", {"rate": 0.1}),
    "bbb-mixture": ("bbb", {"prior": ScaleMixture()}),
    "bbb-lrt": ("bbb", {"noise": "lrt"}),
    "bbb-flipout": ("bbb", {"noise": "flipout"}),
    "noisy-kfac-dense": ("noisy-kfac", {"curvature": {"factor_every": 1, "inverse_every": 10}}),
    "noisy-ekfac": ("noisy-kfac", {"curvature": {"eigenbasis": True}}),
    "bbb-adversarial": ("bbb", {"noise": "adversarial"}),  # five ascents
    **{
        f"ibnn-{count}": (
            "node-bnn",
            {"components": count, "nodes": {"side": "in", "bias_scale": True}, "kl_term": "mean"},
        )
        for count in (4, 32)
    },
}
# Steps between new inverses: a block of so many has one of every kind of step.
PERIODS = {"kfac": 20, "noisy-kfac": 20, "noisy-ekfac": 20, "noisy-kfac-dense": 10}
# Steps after which K-FAC's factors are as rare as they become.
_LATE = 2000
_NOT_ONE_NETWORK = {"ensemble"}  # costs its members' steps


def method_names() -> list[str]:
    """Every method of Credo with its defaults, and the variants worth a row of their own."""
    return list(dict.fromkeys([name for name in METHODS if name not in _NOT_ONE_NETWORK] + list(_OPTIONS)))


def posterior_of(name: str, net: nn.Module) -> Posterior:
    """That method on a network."""
    method, options = _OPTIONS.get(name, (name, {}))
    build: Any = METHODS[method]
    posterior: Posterior = build(net, data_size=DATA_SIZE, **options)
    return posterior


def step_of(posterior: Posterior) -> Step:
    """`posterior.step` on the batch's cross-entropy."""
    return lambda x, y: posterior.step(lambda network: F.cross_entropy(network(x), y))


def method_step(name: str, *, largest: bool = False) -> BuildStep:
    """The step of that method; K-FAC's as later in a training, after the first ones, which make an inverse each.

    Args:
        name: The method.
        largest: Only steps of K-FAC with new factors and new inverses, which need most memory.
    """

    def build(net: nn.Module) -> Step:
        posterior = posterior_of(name, net)
        step = step_of(posterior)

        def later(x: Tensor, y: Tensor) -> None:
            step(x, y)
            posterior.steps = _LATE if largest else max(posterior.steps, _LATE + 1)

        return later if name in PERIODS else step

    return build


def descent_step(
    net: nn.Module,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor],
    build: type[torch.optim.Adam] = torch.optim.Adam,
    **options: Any,
) -> Step:
    """A step of torch's Adam, or of its relative, as every README writes it."""
    optimizer = build(net.parameters(), **options)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss(net, x, y).backward()
        optimizer.step()

    return step


def reference_step(name: str) -> BuildStep:
    """Adam on the same network without anything Bayesian."""
    options = {"fused": True} if name.endswith("fused") else {}
    build = torch.optim.AdamW if name.startswith("AdamW") else torch.optim.Adam
    return lambda net: descent_step(net, _cross_entropy, build, **options)


def _cross_entropy(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)
