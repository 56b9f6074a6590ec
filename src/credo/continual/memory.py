"""What a learner knows after its tasks: Gaussians by parameter name, the last layer's apart for each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from credo.continual.gaussian_algebra import Belief, Tensors
from credo.continual.tasks import Task
from credo.core.prior import Gaussian


@dataclass
class Kept:
    """Means and deviations; `others` are parameters without noise, and buffers, as the last task left them."""

    mean: Tensors = field(default_factory=dict)
    std: Tensors = field(default_factory=dict)
    others: Tensors = field(default_factory=dict)

    def of(self, network: nn.Module, task: Task) -> tuple[Tensors, Tensors]:
        """Means and deviations known of a network's parameters, under their names in it."""
        keys = _keys(network, task)
        means, stds = ({n: known[k] for n, k in keys.items() if k in known} for known in (self.mean, self.std))
        return means, stds

    def knows(self, network: nn.Module, task: Task) -> bool:
        """Whether everything of this network was learned, the head of the task too."""
        return all(key in self.mean or key in self.others for key in _keys(network, task).values())

    def prior(self, network: nn.Module, task: Task, first: Gaussian) -> Gaussian:
        """What is known as a prior; `first` for parameters of which nothing is."""
        mean, std = self.of(network, task)
        if not std:
            return first
        check_first(first)
        return Gaussian({**mean, "*": first.mean}, {**std, "*": first.std})

    @torch.no_grad()
    def fill_(self, network: nn.Module, task: Task, *, means: bool) -> None:
        """Put what is known into a network: what has no noise and, if `means`, the means of the rest."""
        known = {**self.others, **(self.mean if means else {})}
        for name, key in _keys(network, task).items():
            if key not in known:
                continue
            tensor, value = _tensors(network)[name], known[key]
            if tensor.shape != value.shape:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}, what was learned of it {list(value.shape)}: tasks that "
                    "share a head must have equally many classes."
                )
            tensor.copy_(value)

    def take(self, network: nn.Module, task: Task, belief: Belief | None) -> None:
        """Remember a belief about some of a network's parameters (None: a point estimate of all), and all the rest."""
        keys, tensors = _keys(network, task), _tensors(network)
        if belief is None:
            parameters = dict(network.named_parameters())
            self.mean |= {keys[name]: p.detach().clone() for name, p in parameters.items()}
            known = set(parameters)
        else:
            self.mean |= {keys[name]: value for name, value in belief.mean.items()}
            self.std |= {keys[name]: value for name, value in belief.std.items()}
            known = set(belief.mean)
        self.others |= {key: tensors[name].detach().clone() for name, key in keys.items() if name not in known}

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


def check_first(prior: Gaussian) -> None:
    """Refuse a first prior that says nothing of parameters still to come."""
    if not prior.is_uniform:
        raise ValueError(
            "The first prior must be one of numbers, not of vectors or values by name: new heads need one, too. Give "
            "Gaussian(mean, std) with two numbers, or the std alone."
        )


def head_of(network: nn.Module, classes: int) -> set[str]:
    """Names of the last layer: the last one whose parameters all have a row for each class."""
    layers: dict[str, list[tuple[str, Tensor]]] = {}
    for name, parameter in network.named_parameters():
        layers.setdefault(name.rpartition(".")[0], []).append((name, parameter))
    for entries in reversed(layers.values()):
        if all(tensor.dim() and len(tensor) == classes for _, tensor in entries):
            return {name for name, _ in entries}
    raise ValueError(f"{type(network).__name__} has no layer of {classes} outputs, which would be the task's head.")


def _keys(network: nn.Module, task: Task) -> dict[str, str]:
    """Name to where it is kept, once for tied ones: those of the head with the head's name behind an @."""
    head = head_of(network, task.classes)
    return {name: f"{name}@{task.head}" if name in head else name for name in _tensors(network)}


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}
