"""What a learner knows after its tasks: Gaussians by parameter name, the last layer's apart for each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from credo.continual.beliefs import Belief, Tensors
from credo.core.prior import Gaussian
from credo.core.weights import random_names


@dataclass
class Kept:
    """Means and deviations; `others` are parameters without noise, and buffers, as the last task left them."""

    mean: Tensors = field(default_factory=dict)
    std: Tensors = field(default_factory=dict)
    others: Tensors = field(default_factory=dict)

    def of(self, network: nn.Module, head: str) -> tuple[Tensors, Tensors]:
        """Means and deviations known of a network's parameters, under their names in it."""
        keys = _keys(network, head)
        means, stds = ({n: known[k] for n, k in keys.items() if k in known} for known in (self.mean, self.std))
        return means, stds

    def prior(self, network: nn.Module, head: str, first: Gaussian) -> Gaussian:
        """What is known as a prior; `first` for parameters of which nothing is."""
        mean, std = self.of(network, head)
        if not std:
            return first
        if isinstance(first.mean, Tensor) or isinstance(first.std, Tensor):
            raise ValueError("The first prior must be one of numbers, not vectors: new heads need one, too.")
        return Gaussian({**mean, "*": first.mean}, {**std, "*": first.std})

    @torch.no_grad()
    def fill_(self, network: nn.Module, head: str, *, means: bool) -> None:
        """Put what is known into a network: what has no noise and, if `means`, the means of the rest."""
        state = network.state_dict(keep_vars=True)
        for name, value in {**self.others, **(self.of(network, head)[0] if means else {})}.items():
            if name in state and state[name].shape == value.shape:
                state[name].copy_(value)

    def take(self, network: nn.Module, head: str, belief: Belief) -> None:
        """Remember a belief about some of a network's parameters, and all else as the network has it."""
        keys = _keys(network, head)
        self.mean |= {keys[name]: value for name, value in belief.mean.items()}
        self.std |= {keys[name]: value for name, value in belief.std.items()}
        self._take_others(network, set(belief.mean))

    def take_means(self, network: nn.Module, head: str) -> None:
        """Remember a point estimate."""
        keys = _keys(network, head)
        self.mean |= {keys[name]: p.detach().clone() for name, p in network.named_parameters()}
        self._take_others(network, set(keys))

    def _take_others(self, network: nn.Module, known: set[str]) -> None:
        self.others = {n: t.detach().clone() for n, t in network.state_dict().items() if n not in known}

    def state(self) -> Tensors:
        """As tensors by name."""
        groups = (("mean", self.mean), ("std", self.std), ("others", self.others))
        return {f"{group}/{key}": value for group, tensors in groups for key, value in tensors.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Kept:
        """From what `state` gave."""
        groups: dict[str, Tensors] = {"mean": {}, "std": {}, "others": {}}
        for key, value in state.items():
            group, _, name = key.partition("/")
            if group in groups:
                groups[group][name] = value
        return cls(**groups)


def _keys(network: nn.Module, head: str) -> dict[str, str]:
    """Parameter name to where it is kept: those of the last layer, its head, with the head's name behind an @."""
    last = set(random_names(network, "last"))
    return {name: f"{name}@{head}" if name in last else name for name, _ in network.named_parameters()}
