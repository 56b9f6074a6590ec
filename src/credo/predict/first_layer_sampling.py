"""The layer that runs first: found by trying, read off, and replaced by what it would say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from credo.core.network.isolation import NotIsolatedError
from credo.core.network.layer_hooks import covered_layers, parameter_names
from credo.core.network.layer_table import RULES
from credo.core.network.substitute import Draw, substituted
from credo.core.posterior import Posterior


@torch.no_grad()
def first_layer(posterior: Posterior, x: Tensor) -> tuple[str, nn.Module] | None:
    """The layer that runs first, once, on an input that no random weight has touched; None if there is none."""
    model = posterior.model
    tied = {name for group in posterior._aliases.values() if len(group) > 1 for name in group}
    layers = {p: m for p, m in covered_layers(model, tied).items() if getattr(m, "groups", 1) == 1}
    seen: list[list[tuple[str, Tensor]]] = []
    draw: Draw = {}
    # Each member of a mixture has parameters and running statistics of its own before the layer.
    tries = max(2, len(posterior.parts))
    try:
        for draw in posterior.draws(tries):
            with posterior.sampled(draw), _recorded(layers) as fired:
                model(x[:2].clone())  # a network may write into its input
            seen.append(fired)
    except NotIsolatedError:
        raise
    except Exception:  # whatever the network says, it says it again in the real pass
        return None
    if not seen[0] or not draw:
        return None
    path, inputs = seen[0][0]
    again = [fired[0] for fired in seen[1:] if fired]
    once = sum(p == path for p, _ in seen[0]) == 1
    right_rank = inputs.dim() == RULES[type(layers[path])].min_dim
    random = any(name in draw for name in parameter_names(path, layers[path]))
    same = [p == path and other.shape == inputs.shape and torch.equal(inputs, other) for p, other in again]
    untouched = all(same) and len(same) == len(seen) - 1
    return (path, layers[path]) if once and right_rank and random and untouched else None


@torch.no_grad()
def is_alone(posterior: Posterior, path: str, layer: nn.Module, x: Tensor) -> bool:
    """Whether the layer sees one row per input, and nothing but the layer reads its weights."""
    model = posterior.model
    with seen_by(model, layer, x.clone()) as inputs:
        hidden = layer(inputs)
    if len(inputs) != len(x):
        return False  # several rows of one input need the same weights
    poison = {name: torch.full_like(model.get_parameter(name), torch.nan) for name in parameter_names(path, layer)}
    with substituted(model, poison, posterior._aliases), returning(layer, hidden):
        return bool(torch.isfinite(model(x.clone())).all())


@contextmanager
def _recorded(layers: dict[str, nn.Module]) -> Iterator[list[tuple[str, Tensor]]]:
    fired: list[tuple[str, Tensor]] = []

    def hook_for(path: str) -> object:
        return lambda layer, inputs: fired.append((path, inputs[0].clone()))

    handles = [m.register_forward_pre_hook(hook_for(p)) for p, m in layers.items()]  # type: ignore[arg-type]
    try:
        yield fired
    finally:
        for handle in handles:
            handle.remove()


class _Seen(Exception):  # noqa: N818 - control flow: nothing is wrong
    pass


@contextmanager
def seen_by(model: nn.Module, layer: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """What reaches `layer` when the network gets `x`: the pass stops there."""
    inputs: list[Tensor] = []

    def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0])
        raise _Seen

    handle = layer.register_forward_pre_hook(stop)
    try:
        model(x)
    except _Seen:
        pass
    finally:
        handle.remove()
    yield inputs[0]


@contextmanager
def returning(layer: nn.Module, output: Tensor) -> Iterator[None]:
    """While open, the layer's work is already done: it returns `output`."""
    layer.__dict__["forward"] = lambda *inputs: output
    try:
        yield
    finally:
        del layer.__dict__["forward"]


def run_before(model: nn.Module, layer: nn.Module, x: Tensor) -> list[nn.Module]:
    """Modules without children that run before `layer`, and only once in the whole pass: input scaling, say.

    Without those whose output is written into later: it could not be used twice.
    """
    order: list[nn.Module] = []
    said: dict[int, tuple[Tensor, int | None]] = {}
    leaves = [m for m in model.modules() if not m._modules]
    handles = [m.register_forward_pre_hook(lambda m, inputs: order.append(m)) for m in leaves]
    handles += [m.register_forward_hook(lambda m, _, out: said.update({id(m): (out, _version(out))})) for m in leaves]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    before = order[: order.index(layer)]
    return [m for m in before if sum(m is other for other in order) == 1 and _is_unchanged(*said[id(m)])]


def read_before(model: nn.Module, layer: nn.Module, before: list[nn.Module], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What reaches `layer`, and what the modules `before` it say, for this input."""
    said: dict[int, Tensor] = {}
    handles = [m.register_forward_hook(lambda m, inputs, output: said.update({id(m): output})) for m in before]
    try:
        with seen_by(model, layer, x) as inputs:
            return inputs, [said[id(m)] for m in before]
    finally:
        for handle in handles:
            handle.remove()


def _version(output: object) -> int | None:
    """How often torch has seen a tensor change; None where it does not count."""
    return output._version if isinstance(output, Tensor) and not output.is_inference() else None


def _is_unchanged(output: Tensor, version: int | None) -> bool:
    return version is not None and output._version == version
