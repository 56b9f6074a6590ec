"""Groups of arguments of node-based BNNs: the nodes, their first values, and the KL of their mixture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from credo.core.arguments import Group
from credo.core.errors import unknown
from credo.core.kl_schedule import KLTerm
from credo.core.support.validate import is_number
from credo.methods.node.elbo_terms import KINDS

SIDES = ("in", "out", "both")


@dataclass(frozen=True)
class Nodes(Group):
    """Which nodes of a network have a random scale.

    Attributes:
        side: Which nodes of Linear and Conv layers: `"in"`, `"out"` or `"both"`.
        bias_scale: Whether each layer's bias has a scale, too (iBNN has it, with `side="in"`).
        layers: `"all"` Linear and Conv layers, or globs of their paths.
    """

    argument: ClassVar[str] = "nodes"
    short: ClassVar[str] = "side"

    side: str = "in"
    bias_scale: bool = False
    layers: str | Sequence[str] = "all"

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise ValueError(unknown("nodes.side", str(self.side), SIDES))
        if not isinstance(self.bias_scale, bool):
            raise ValueError(
                f"nodes.bias_scale={self.bias_scale!r:.80} must be True or False: whether biases have a scale, too."
            )


@dataclass(frozen=True)
class NodeInit(Group):
    """The Gaussians over nodes before training.

    Attributes:
        std: First standard deviation of the nodes, up to 10 % noise.
        spread: Standard deviation of the components' first means around 1.
    """

    argument: ClassVar[str] = "init"
    short: ClassVar[str] = "std"

    std: float = 0.1
    spread: float = 0.3

    def __post_init__(self) -> None:
        check_number("init.std", self.std, positive=True)
        check_number("init.spread", self.spread)


@dataclass(frozen=True)
class NodeKLTerm(KLTerm):
    """How the KL of the nodes is computed, and how it is weighted at each step.

    Attributes:
        estimator: `"bound"`: the entropy bound over all layers together. `"layer-bound"`: summed over layers as in the
            authors' code, which counts the gain of up to log K once for each layer and so is no bound. `"mean"` and
            `"full"`: those of iBNN.
        gamma: Factor γ on the additional entropy; above 0 the posterior is hotter.
    """

    estimator: str = "bound"
    gamma: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimator not in KINDS:
            raise ValueError(unknown("kl_term.estimator", self.estimator, KINDS))
        check_number("kl_term.gamma", self.gamma)
        if self.gamma and "bound" not in self.estimator:
            raise ValueError(
                f"kl_term.gamma={self.gamma} weighs the entropy, which kl_term.estimator={self.estimator!r} does not "
                "have: use 'bound'."
            )


def check_number(name: str, value: Any, *, positive: bool = False) -> None:
    """Raise ValueError unless the argument `name` is a number, finite and not negative, or `positive`."""
    if not is_number(value):
        raise ValueError(f"{name}={value!r:.80} must be a number.")
    if not (math.isfinite(value) and value >= 0) or (positive and value == 0):
        raise ValueError(f"{name}={value} must be finite and {'positive' if positive else 'not negative'}.")
