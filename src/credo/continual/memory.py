"""What a learner carries from task to task: Gaussian moments by parameter name, with a separate last layer per head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from credo.continual.gaussian_algebra import GaussianMoments, Tensors
from credo.continual.tasks import Task
from credo.core.prior import Gaussian


@dataclass
class TaskMemory:
    """Moments of everything learned so far; `others` are parameters without noise and buffers, as of the last task."""

    mean: Tensors = field(default_factory=dict)
    std: Tensors = field(default_factory=dict)
    others: Tensors = field(default_factory=dict)

    def of(self, network: nn.Module, task: Task) -> tuple[Tensors, Tensors]:
        """Stored means and standard deviations of a network's parameters, under their names in it."""
        keys = _keys(network, task)
        means, stds = ({n: known[k] for n, k in keys.items() if k in known} for known in (self.mean, self.std))
        return means, stds

    def covers(self, network: nn.Module, task: Task) -> bool:
        """Whether every parameter of the network was learned, including the head of the task."""
        return all(key in self.mean or key in self.others for key in _keys(network, task).values())

    def prior(self, network: nn.Module, task: Task, first: Gaussian) -> Gaussian:
        """The prior for the `network` of a `task`; `first` for parameters that are not in the memory."""
        mean, std = self.of(network, task)
        if not std:
            return first
        check_first(first)
        return Gaussian({**mean, "*": first.mean}, {**std, "*": first.std})

    @torch.no_grad()
    def fill_(self, network: nn.Module, task: Task, *, means: bool) -> None:
        """Copy parameters without noise and buffers, and with `means` also these, into the `network` of a `task`."""
        known = {**self.others, **(self.mean if means else {})}
        for name, key in _keys(network, task).items():
            if key not in known:
                continue
            tensor, value = _tensors(network)[name], known[key]
            if tensor.shape != value.shape:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}, but {list(value.shape)} was learned: tasks that share a "
                    "head must have the same number of classes."
                )
            tensor.copy_(value)

    def store(self, network: nn.Module, task: Task, moments: GaussianMoments | None) -> None:
        """Store the `network` of a `task` with the `moments` of its random parameters (None: a point estimate)."""
        keys, tensors = _keys(network, task), _tensors(network)
        if moments is None:
            parameters = dict(network.named_parameters())
            self.mean |= {keys[name]: p.detach().clone() for name, p in parameters.items()}
            known = set(parameters)
        else:
            self.mean |= {keys[name]: value for name, value in moments.mean.items()}
            self.std |= {keys[name]: value for name, value in moments.std.items()}
            known = set(moments.mean)
        self.others |= {key: tensors[name].detach().clone() for name, key in keys.items() if name not in known}

    def state(self) -> Tensors:
        """All tensors by name, for files."""
        groups = (("mean", self.mean), ("std", self.std), ("others", self.others))
        return {f"{group}/{key}": value for group, tensors in groups for key, value in tensors.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> TaskMemory:
        """Rebuild from `state()`."""
        groups: dict[str, Tensors] = {"mean": {}, "std": {}, "others": {}}
        for key, value in state.items():
            group, _, name = key.partition("/")
            if group in groups:
                groups[group][name] = value
        return cls(**groups)


def check_first(prior: Gaussian) -> None:
    """Raise ValueError if the first prior does not apply to parameters that come later."""
    if not prior.is_uniform:
        raise ValueError(
            "The first prior must have one mean and one std, not vectors or values by name, since new heads need it, "
            "too. Give Gaussian(mean, std) with two numbers, or the std alone."
        )


def head_of(network: nn.Module, classes: int) -> set[str]:
    """Parameter names of the last layer whose parameters all have one row per class."""
    layers: dict[str, list[tuple[str, Tensor]]] = {}
    for name, parameter in network.named_parameters():
        layers.setdefault(name.rpartition(".")[0], []).append((name, parameter))
    for entries in reversed(layers.values()):
        if all(tensor.dim() and len(tensor) == classes for _, tensor in entries):
            return {name for name, _ in entries}
    raise ValueError(f"{type(network).__name__} has no layer of {classes} outputs, which would be the task's head.")


def _keys(network: nn.Module, task: Task) -> dict[str, str]:
    """Key of each tensor in the memory; parameters of the head end in @ and the head's name."""
    head = head_of(network, task.classes)
    return {name: f"{name}@{task.head}" if name in head else name for name in _tensors(network)}


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}
