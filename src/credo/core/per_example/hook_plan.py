"""What one pass hooks: layers with a rule, and modules that are run example by example."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from credo.core.errors import CredoError
from credo.core.per_example.first_pass_checks import FirstPassChecks
from credo.core.per_example.layer_rules import ExampleGradients

Forward = Callable[..., Any]


class PlanChangedError(CredoError, RuntimeError):
    """The pass showed that a larger module must be run for some parameters; the plan is changed: run the pass again.

    Args:
        message: What happened.
        changed: Inputs of the network that the pass has changed in place, each with its version since.
    """

    def __init__(self, message: str, changed: Sequence[tuple[Tensor, int]] = ()) -> None:
        super().__init__(message)
        self.changed = changed


@dataclass(frozen=True)
class HookedLayer:
    """A layer with a rule.

    Attributes:
        path: Its name in the network.
        layer: The layer.
        names: Names in the network of those of its parameters (weight, bias) that are wanted, by their names in it.
        rule: Its rule, where that does not depend on the layer's mode.
        forward: Makes its forward for one pass, from the pass, this, and the layer's own parameters.
    """

    path: str
    layer: nn.Module
    names: Mapping[str, str]
    rule: ExampleGradients | None
    forward: Callable[[Any, HookedLayer, dict[str, Any]], Forward]

    @cached_property
    def owners(self) -> tuple[tuple[nn.Module, Mapping[str, str]], ...]:
        """The modules whose parameters the layer reads, itself first, each with the names of those that are wanted."""
        found: dict[nn.Module, dict[str, str]] = {self.layer: {}}
        for inside, name in self.names.items():
            path, _, key = inside.rpartition(".")
            found.setdefault(self.layer.get_submodule(path), {})[key] = name
        return tuple(found.items())


def all_ways() -> list[tuple[str, str]]:
    """How a module can be run example by example: all at once or in turn, in its own mode or else in eval mode."""
    return [(way, mode) for mode in ("as it is", "eval") for way in ("vmap", "loop")]


@dataclass
class FallbackModule:
    """A module without a rule, which is run example by example for parameters in or below it.

    Attributes:
        path: Its name in the network.
        module: The module.
        forward: Makes its forward for one pass, from the pass, this, and the module's own forward.
        inside: Names inside the module of each parameter, by name in the network.
        ways: The ways of running it that have not failed yet.
        is_spread: Whether a pass with one copy of the parameters for each example was found to give the gradients of
            single examples; None before it was tried.
    """

    path: str
    module: nn.Module
    forward: Callable[[Any, FallbackModule, Forward], Forward]
    inside: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ways: list[tuple[str, str]] = field(default_factory=all_ways)
    is_spread: bool | None = None

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"{self.path or 'the network'} ({type(self.module).__name__})"


class HookPlan(ABC):
    """What a pass needs to know: where hooks go, and what to do with the modules that are run again.

    Attributes:
        model: The network.
        names: The parameters whose squared gradients are wanted.
        owners: For each, the dictionary and key that hold it.
        layers: Layers with a rule.
        modules: Modules without one, by path.
        hooks_network: Whether the network's own call is hooked; it tells how many examples there are.
        token_layers: Paths of embeddings whose input once was one token an example, and no position ids.
        first_passes: Checks of the first passes.
    """

    model: nn.Module
    names: tuple[str, ...]
    owners: Mapping[str, tuple[Any, str]]
    layers: Sequence[HookedLayer]
    modules: Mapping[str, FallbackModule]
    hooks_network: bool
    token_layers: set[str]
    first_passes: FirstPassChecks

    @abstractmethod
    def check_modes(self) -> None:
        """Raise UnsupportedModelError if modules are in modes in which results would be wrong."""

    @abstractmethod
    def finish_modules(self, run: Any) -> None:
        """Run the modules of a pass (a `PerExamplePass`) example by example."""

    @abstractmethod
    def widen(self, reasons: Mapping[str, str]) -> None:
        """Give each of these parameters to the next larger module."""
