"""What `credo.auto` tries: one row for each candidate, in the order in which a short budget takes them.

The order of the rows for untrained networks is that of the benchmark of untouched defaults (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from credo.core.posterior import Posterior
from credo.methods import BBB, IVON, MAP, SWAG, VOGN, Laplace, NodeBNN, NoisyKFAC

PLAIN = "plain"


@dataclass(frozen=True)
class Candidate:
    """A method that `auto` may try.

    Attributes:
        name: What the table calls it.
        build: `build(network, data_size=…, likelihood=…, seed=…)` makes the posterior; raises where it is impossible.
        trains: Whether it makes steps; otherwise one pass over the training rows, if any, by `end_training_`.
        pass_cost: What an epoch costs, or that one pass, in forward and backward passes of the plain network: a forward
            pass alone is a third. `OUTPUTS`: one backward pass for each output.
        prediction: Networks that run for one input: `ONE`, `OUTPUTS` (one and a gradient for each output) or `DRAWS`.
    """

    name: str
    build: Callable[..., Posterior]
    trains: bool = True
    pass_cost: float | str = 1.0
    prediction: str = "draws"

    def cost_of_pass(self, outputs: int) -> float:
        """Cost of one pass over the training rows.

        Args:
            outputs: Number of outputs of the network.
        """
        return (1 + 2 * outputs) / 3 if isinstance(self.pass_cost, str) else self.pass_cost

    def networks(self, outputs: int, draws: int, members: int = 1) -> int:
        """Networks that run for one input, with gradients counted as networks.

        Args:
            outputs: Number of outputs of the network.
            draws: Networks that a method with draws averages over.
            members: Members of an ensemble of it.
        """
        if self.prediction == DRAWS:
            return -(-draws // members) * members
        return members * (1 + outputs if self.prediction == OUTPUTS else 1)


ONE, OUTPUTS, DRAWS = "one", "outputs", "draws"
FORWARD = 1 / 3  # of a forward and a backward pass, which costs twice a forward one


def _pretrained_bbb(model: nn.Module, **common: Any) -> Posterior:
    return BBB.from_pretrained(model, lr={"rho": 1e-2, "*": 1e-3}, **common)


def _all_layers(model: nn.Module, **common: Any) -> Posterior:
    return Laplace(model, random="all", **common)


def _fine_ivon(model: nn.Module, **common: Any) -> Posterior:
    return IVON(model, lr=0.1, **common)


def _fine_nodes(model: nn.Module, **common: Any) -> Posterior:
    return NodeBNN(model, lr={"nodes.*": 1e-2, "*": 3e-4}, **common)


def _fine_swag(model: nn.Module, **common: Any) -> Posterior:
    return SWAG(model, start=0.0, **common)


UNTRAINED = (
    Candidate(PLAIN, MAP, prediction=ONE),
    Candidate("noisy-kfac", NoisyKFAC),
    Candidate("bbb", BBB),
    Candidate("vogn", VOGN),
)
TRAINED = (
    Candidate(PLAIN, MAP, trains=False, pass_cost=0.0, prediction=ONE),
    Candidate("laplace-last", Laplace, trains=False, pass_cost=FORWARD, prediction=ONE),
    Candidate("laplace-kron", _all_layers, trains=False, pass_cost=OUTPUTS, prediction=OUTPUTS),
    Candidate("swag", _fine_swag),
    Candidate("bbb", _pretrained_bbb),
    Candidate("ivon", _fine_ivon),
    Candidate("node-bnn", _fine_nodes),
)
