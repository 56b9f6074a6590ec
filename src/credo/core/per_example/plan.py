"""Decide how each parameter's squared per-example gradients are found: by its layer's rule, or by running a module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from credo.core.errors import UnsupportedModelError, unknown
from credo.core.network.layer_table import EXAMPLE_GRADIENTS
from credo.core.network.selection import join
from credo.core.network.substitute import aliases as all_aliases
from credo.core.per_example.first_pass_checks import FirstPassChecks
from credo.core.per_example.hook_plan import FallbackModule, HookedLayer, HookPlan
from credo.core.per_example.hooks import PerExamplePass
from credo.core.per_example.layer_calls import layer_forward
from credo.core.per_example.layer_rules import ExampleGradients
from credo.core.per_example.module_fallback import finish_module, module_forward
from credo.core.per_example.norm_rules import norm
from credo.core.per_example.sequences.attention_layers import attention_forward, is_attention
from credo.core.per_example.sequences.rnn_cells import is_recurrent
from credo.core.per_example.sequences.rnn_layers import recurrent_forward


class PerExamplePlan(HookPlan):
    """Made once for a network and the parameters wanted, then used at every step; passes may change it.

    Layers of the table have rules. Any other module that owns parameters is run example by example with all below it,
    and so is the parent (in the end the network) if a parameter turns out to be read from outside of its own layer's
    call, or if a layer's input does not begin with the batch.

    Raises UnsupportedModelError for a network for which results could not be right, with all problems that its modules
    show at once; what only a pass can show (a batch that is not in front, randomness in a function) is raised there.

    Args:
        model: The network.
        names: The parameters whose squared gradients are wanted.
        aliases: All names of each parameter, if known already.
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
        modules = {name: self._modules[name.rpartition(".")[0]] for name in self.names}
        self.owners: dict[str, tuple[Any, str]] = {
            name: (module._parameters, name.rpartition(".")[2]) for name, module in modules.items()
        }
        self.others = [p for name, p in parameters.items() if name not in modules]
        self.token_layers: set[str] = set()
        self.first_passes = FirstPassChecks()
        self._arrange({name: path for name in self.names if (path := self._first_module(name)) is not None})

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles are made anew for the network that is copied along; rules are functions and hold nothing.
        return _remade, (self.model, self.names, self.aliases, self._module_of)

    def on(self, model: nn.Module) -> PerExamplePlan:
        """The same plan for another copy of the network, with all that it has learned from passes."""
        if model is self.model:
            return self
        plan = _remade(model, self.names, self.aliases, self._module_of)
        plan.token_layers, plan.first_passes = self.token_layers, self.first_passes
        return plan

    def widen(self, reasons: Mapping[str, str]) -> None:
        """Give each of these parameters to the next larger module.

        Raises UnsupportedModelError if there is none; the plan is as before then: another batch may not need it.
        """
        stuck, module_of = [], dict(self._module_of)
        for name, reason in reasons.items():
            path = module_of.get(name, _common([self._opaque(owner) for owner in self._owners_of(name)]))
            if name not in module_of and _is_unrolled(self._modules[path]):  # first as a module of its own
                module_of[name] = path
            elif path == "":
                stuck.append(f"{name} {reason}")
            else:
                module_of[name] = self._callable(path.rpartition(".")[0])
        self._check(stuck)
        self._arrange(module_of)

    def check_modes(self) -> None:
        """Raise UnsupportedModelError if modules are in modes in which results would be wrong."""
        self._check(_module_problems(self.modules.values()))

    def finish_modules(self, run: PerExamplePass) -> None:
        """Run the modules of a pass example by example."""
        for module in self.modules.values():
            finish_module(run, module)

    def _check(self, problems: Iterable[str]) -> None:
        listed = "; ".join(problems)
        if listed:
            raise UnsupportedModelError(
                f"Squared per-example gradients are impossible for {type(self.model).__name__}: {listed}. Leave such "
                "parameters out, or put each into a module of its own that gets and returns the batch."
            )

    # -- layers and modules ------------------------------------------------------------------------------------

    def _owners_of(self, name: str) -> list[str]:
        return [alias.rpartition(".")[0] for alias in self.aliases[name]]

    def _first_module(self, name: str) -> str | None:
        """Path of the module that must be run; None if the parameter's own layers have rules."""
        owners = self._owners_of(name)
        lifted = [self._opaque(path) for path in owners]
        ruled = zip(lifted, owners, strict=True)
        if all(_has_rule(self._modules[outer]) and _reads(self._modules[outer], outer == own) for outer, own in ruled):
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

    def _arrange(self, module_of: dict[str, str]) -> None:
        layers: dict[int, HookedLayer] = {}
        modules: dict[str, FallbackModule] = {}
        for name in self.names:
            path = module_of.get(name)
            if path is not None:
                start = len(path) + 1 if path else 0
                inside = [alias[start:] for alias in self.aliases[name] if alias.startswith(f"{path}." if path else "")]
                fallback = modules.setdefault(path, FallbackModule(path, self._modules[path], module_forward))
                fallback.inside[name] = tuple(inside)
                continue
            for alias in self.aliases[name]:
                owner = self._opaque(alias.rpartition(".")[0])
                key, layer = alias[len(owner) + 1 if owner else 0 :], self._modules[owner]
                before = layers.get(id(layer))
                names = {**before.names, key: name} if before else {key: name}
                forward = _FORWARDS.get(type(layer), layer_forward)
                owner = before.path if before else owner
                layers[id(layer)] = HookedLayer(owner, layer, names, _fixed_rule(layer), forward)
        self._check([*self._layer_problems(layers.values(), modules), *_module_problems(modules.values())])
        self._module_of, self.layers, self.modules = module_of, list(layers.values()), modules
        # The network's own input tells how many examples there are; a layer that is the network sees it anyway.
        self.hooks_network = all(hooked.layer is not self.model for hooked in self.layers)

    def _layer_problems(self, layers: Collection[HookedLayer], modules: Iterable[str]) -> Iterator[str]:
        for hooked in layers:
            if isinstance(hooked.layer, nn.Embedding) and (hooked.layer.sparse or hooked.layer.scale_grad_by_freq):
                yield f"{hooked.path}: embeddings with sparse=True or scale_grad_by_freq=True are not possible"
        used = {hooked.path for hooked in layers} | set(modules)
        for path in sorted({outer for inner in used for outer in _prefixes(inner)}):
            module = self._modules[path]
            if _is_compiled(module):
                yield f"{path or 'the network'} is compiled, so its layers cannot be looked into: give the plain module"


def _remade(
    model: nn.Module, names: tuple[str, ...], aliases: Mapping[str, tuple[str, ...]], module_of: dict[str, str]
) -> PerExamplePlan:
    plan = PerExamplePlan(model, names, aliases)
    plan._arrange(module_of)
    return plan


def _has_rule(layer: nn.Module) -> bool:
    # Hook-style weight norm, spectral norm and pruning keep the type but compute `weight` from other parameters.
    plain = layer._parameters.keys() <= {"weight", "bias"} and "weight" in layer._parameters
    own = plain and type(layer) in EXAMPLE_GRADIENTS and "forward" not in layer.__dict__
    return own or _is_unrolled(layer)


def _is_unrolled(layer: nn.Module) -> bool:
    """Whether the layer's own computation is made here, of parts with rules."""
    return is_recurrent(layer) or is_attention(layer)


def _reads(layer: nn.Module, itself: bool) -> bool:
    """Whether the layer's rule reads the parameter, one of its own or (attention) of a module inside."""
    return itself or is_attention(layer)


_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), recurrent_forward),
    nn.MultiheadAttention: attention_forward,
}


def _is_compiled(module: nn.Module) -> bool:
    by_dynamo = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
    return by_dynamo or isinstance(module, torch.jit.ScriptModule)


def _fixed_rule(layer: nn.Module) -> ExampleGradients | None:
    make = EXAMPLE_GRADIENTS.get(type(layer))
    return None if make is None or make is norm else make(layer)


def _module_problems(modules: Iterable[FallbackModule]) -> Iterator[str]:
    for fallback in modules:
        yield from _problems_of(fallback)


def _problems_of(fallback: FallbackModule) -> Iterator[str]:
    if isinstance(fallback.module, nn.MultiheadAttention | nn.RNNBase) and not fallback.module.batch_first:
        yield f"{fallback.title} has batch_first=False: examples must come first, build it with batch_first=True"
    why = f"{fallback.title} is run example by example for {', '.join(fallback.inside)}"
    for path, module in fallback.module.named_modules():
        inner = f"{join(fallback.path, path) if path else fallback.path or 'the network'} ({type(module).__name__})"
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
