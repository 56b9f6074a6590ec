"""Which module answers for which parameter's squares: covered layers for themselves, whole modules for the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from credo.core.errors import CredoError, UnsupportedModelError, unknown
from credo.core.network.layer_table import EXAMPLE_GRADIENTS
from credo.core.network.selection import join
from credo.core.network.substitute import aliases as all_aliases
from credo.core.per_example.first_steps import FirstSteps
from credo.core.per_example.layer_rules import ExampleGradients
from credo.core.per_example.norm_rules import norm
from credo.core.per_example.rnn_cells import is_recurrent


class PlanChangedError(CredoError, RuntimeError):
    """The pass showed that a larger module must answer for some parameters; the plan knows now: run it again."""


@dataclass(frozen=True)
class LayerTap:
    """A covered layer and those of its parameters (weight, bias) whose squares are wanted, by name in the network.

    `rule` is there where it does not depend on the layer's mode.
    """

    path: str
    layer: nn.Module
    names: Mapping[str, str]
    rule: ExampleGradients | None


def all_ways() -> list[tuple[str, str]]:
    """How a module can be run example by example: all at once or in turn, in its own mode or else in eval mode."""
    return [(way, mode) for mode in ("as it is", "eval") for way in ("vmap", "loop")]


@dataclass
class Unit:
    """A module that is run example by example for parameters in or below it.

    `places` gives each parameter's names inside the module. `ways` are those of running it that have not failed yet.
    """

    path: str
    module: nn.Module
    places: dict[str, tuple[str, ...]]
    ways: list[tuple[str, str]] = field(default_factory=all_ways)

    @property
    def title(self) -> str:
        """How messages call it."""
        return f"{self.path or 'the network'} ({type(self.module).__name__})"


class SquarePlan:
    """Made once for a network and the parameters wanted, then used at every step; learns from passes.

    Layers of the table are tapped. Any other module that owns parameters is a unit with all below it, and so is the
    parent (in the end the network) where a parameter turns out to be read from outside of its own layer's call, or
    where a layer's input does not begin with the batch.
    """

    def __init__(
        self, model: nn.Module, names: Iterable[str], aliases: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        self.model = model
        self.aliases = all_aliases(model) if aliases is None else aliases
        self.names = tuple(names)
        self._modules = dict(model.named_modules(remove_duplicate=False))
        parameters = dict(model.named_parameters())
        for name in self.names:
            if name not in parameters:
                raise ValueError(unknown("parameter", name, parameters))
        owners = {name: self._modules[name.rpartition(".")[0]] for name in self.names}
        self.places: dict[str, tuple[Any, str]] = {
            name: (owner._parameters, name.rpartition(".")[2]) for name, owner in owners.items()
        }
        self.others = [p for name, p in parameters.items() if name not in owners]
        # Layers whose input was once one token an example and no run of numbers, which places always are.
        self.token_layers: set[str] = set()
        self.first_steps = FirstSteps()
        self._arrange({name: path for name in self.names if (path := self._first_unit(name)) is not None})

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles are made anew for the network that is copied along; rules are functions and hold nothing.
        return _remade, (self.model, self.names, self.aliases, self._unit_of)

    def on(self, model: nn.Module) -> SquarePlan:
        """The same plan for another copy of the network, with all that passes have taught it."""
        if model is self.model:
            return self
        plan = _remade(model, self.names, self.aliases, self._unit_of)
        plan.token_layers, plan.first_steps = self.token_layers, self.first_steps
        return plan

    def widen(self, reasons: Mapping[str, str]) -> None:
        """Give each of these parameters to the next larger module; refused where that is no longer possible.

        Refused, the plan is as before: another batch may not need it.
        """
        stuck, unit_of = [], dict(self._unit_of)
        for name, reason in reasons.items():
            path = unit_of.get(name, _common(self._owners(name)))
            if name not in unit_of and is_recurrent(self._modules[path]):  # first as a unit of its own
                unit_of[name] = path
            elif path == "":
                stuck.append(f"{name} {reason}")
            else:
                unit_of[name] = self._callable(path.rpartition(".")[0])
        if stuck:
            raise UnsupportedModelError(_message(self.model, stuck))
        self._arrange(unit_of)

    def check_modes(self) -> None:
        """Refuse what cannot be right in the modes that modules are in now, all problems in one message."""
        self._refuse(_unit_problems(self.units.values()))

    def _refuse(self, problems: Iterable[str]) -> None:
        listed = list(problems)
        if listed:
            raise UnsupportedModelError(_message(self.model, listed))

    # -- who answers for what ----------------------------------------------------------------------------------

    def _owners(self, name: str) -> list[str]:
        return [alias.rpartition(".")[0] for alias in self.aliases[name]]

    def _first_unit(self, name: str) -> str | None:
        """Path of the module that must answer; None if the parameter's own layers can."""
        owners = self._owners(name)
        lifted = [self._opaque(path) for path in owners]
        if lifted == owners and all(_is_covered(self._modules[path]) for path in owners):
            return None
        if len({id(self._modules[path]) for path in lifted}) == 1:
            return self._callable(lifted[0])
        return self._callable(_common(lifted))

    def _opaque(self, path: str) -> str:
        """The outermost module around `path` that reads the parameters below it by itself; else `path`."""
        for outer in _prefixes(path):
            module = self._modules[outer]
            if isinstance(module, nn.MultiheadAttention) or parametrize.is_parametrized(module):
                return outer
        return path

    def _callable(self, path: str) -> str:
        """`path`, or the nearest module around it that is called (a ModuleList is not)."""
        while path and type(self._modules[path]).forward is nn.Module.forward:
            path = path.rpartition(".")[0]
        return path

    def _arrange(self, unit_of: dict[str, str]) -> None:
        layers: dict[int, LayerTap] = {}
        units: dict[str, Unit] = {}
        for name in self.names:
            path = unit_of.get(name)
            if path is not None:
                start = len(path) + 1 if path else 0
                inside = [alias[start:] for alias in self.aliases[name] if alias.startswith(f"{path}." if path else "")]
                units.setdefault(path, Unit(path, self._modules[path], {})).places[name] = tuple(inside)
                continue
            for alias in self.aliases[name]:
                owner, _, key = alias.rpartition(".")
                layer = self._modules[owner]
                before = layers.get(id(layer))
                names = {**before.names, key: name} if before else {key: name}
                layers[id(layer)] = LayerTap(before.path if before else owner, layer, names, _fixed_rule(layer))
        self._refuse([*self._layer_problems(layers.values(), units), *_unit_problems(units.values())])
        self._unit_of, self.layers, self.units = unit_of, list(layers.values()), units
        # The network's own input says how many examples there are; a layer that is the network sees it anyway.
        self.watches_root = all(tap.layer is not self.model for tap in self.layers)

    def _layer_problems(self, layers: Collection[LayerTap], units: Iterable[str]) -> Iterator[str]:
        for tap in layers:
            if isinstance(tap.layer, nn.Embedding) and (tap.layer.sparse or tap.layer.scale_grad_by_freq):
                yield f"{tap.path}: embeddings with sparse=True or scale_grad_by_freq=True are not possible"
        used = {tap.path for tap in layers} | set(units)
        for path in sorted({outer for inner in used for outer in _prefixes(inner)}):
            module = self._modules[path]
            if _is_compiled(module):
                yield f"{path or 'the network'} is compiled, so its layers cannot be looked into: give the plain module"


def _remade(
    model: nn.Module, names: tuple[str, ...], aliases: Mapping[str, tuple[str, ...]], unit_of: dict[str, str]
) -> SquarePlan:
    plan = SquarePlan(model, names, aliases)
    plan._arrange(unit_of)
    return plan


def check_squares(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse a network for whose parameters squares cannot be right, all problems that its modules show at once.

    What only a pass can show (a batch that is not in front, randomness in a function) is refused there.
    """
    SquarePlan(model, names)


def _is_covered(layer: nn.Module) -> bool:
    # Hook-style weight norm, spectral norm and pruning keep the type but compute `weight` from other parameters.
    plain = layer._parameters.keys() <= {"weight", "bias"} and "weight" in layer._parameters
    own = plain and type(layer) in EXAMPLE_GRADIENTS and "forward" not in layer.__dict__
    return own or is_recurrent(layer)


def _is_compiled(module: nn.Module) -> bool:
    by_dynamo = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
    return by_dynamo or isinstance(module, torch.jit.ScriptModule)


def _fixed_rule(layer: nn.Module) -> ExampleGradients | None:
    make = EXAMPLE_GRADIENTS.get(type(layer))
    return None if make is None or make is norm else make(layer)


def _unit_problems(units: Iterable[Unit]) -> Iterator[str]:
    for unit in units:
        yield from _problems_of(unit)


def _problems_of(unit: Unit) -> Iterator[str]:
    if isinstance(unit.module, nn.MultiheadAttention | nn.RNNBase) and not unit.module.batch_first:
        yield f"{unit.title} has batch_first=False: examples must come first, build it with batch_first=True"
    why = f"{unit.title} is run example by example for {', '.join(unit.places)}"
    for path, module in unit.module.named_modules():
        inner = f"{join(unit.path, path) if path else unit.path or 'the network'} ({type(module).__name__})"
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            yield f"{why}, which is impossible with {inner} in training mode inside, which couples examples"
        elif module.training and _dropout_rate(module) > 0:
            yield f"{why}, which is impossible with active dropout at {inner} inside: set it to 0"


def _dropout_rate(module: nn.Module) -> float:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p
    if isinstance(module, nn.RNNBase):
        return module.dropout if module.num_layers > 1 else 0.0
    return module.dropout if isinstance(module, nn.MultiheadAttention) else 0.0


def _message(model: nn.Module, problems: list[str]) -> str:
    advice = "Leave such parameters out, or put each into a module of its own that gets and returns the batch"
    listed = "; ".join(problems)
    return f"Squares of per-example gradients are impossible for {type(model).__name__}: {listed}. {advice}."


def _prefixes(path: str) -> Iterator[str]:
    """The paths around and including `path`, outermost first."""
    yield ""
    parts = path.split(".") if path else []
    yield from (".".join(parts[: count + 1]) for count in range(len(parts)))


def _common(paths: list[str]) -> str:
    """Path of the innermost module around all these."""
    shared: list[str] = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
