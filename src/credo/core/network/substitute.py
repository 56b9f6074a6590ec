"""Changes of a network that are undone on exit: other tensors as its parameters and buffers, and other modes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, cast

from torch import Tensor, nn

from credo.core.errors import UnsupportedModelError, unknown
from credo.core.network.isolation import NotIsolatedError

Draw = Mapping[str, Tensor]
NOTHING: AbstractContextManager[Any] = nullcontext()  # has no state, and may be opened any number of times


def aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each parameter and buffer in the network, by the first: several where weights are tied."""
    names: dict[int, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return {group[0]: tuple(group) for group in names.values()}


def parameters_at(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """The network's parameters of these names."""
    found: Any = {}
    for name in names:
        path, key = _parts(name)
        found[name] = _submodule(model, path)._parameters[key]
    return cast(dict[str, nn.Parameter], found)


@contextmanager
def substituted(
    model: nn.Module,
    tensors: Draw,
    names: Mapping[str, tuple[str, ...]] | None = None,
    *,
    original: nn.Module | None = None,
    beside: AbstractContextManager[Any] = NOTHING,
) -> Iterator[nn.Module]:
    """The same network with `tensors` in the place of its parameters; undone on exit, also after an error.

    Nothing is written into the parameters, so several draws may live in one autograd graph. Unlike
    `torch.func.functional_call` this also covers methods other than `forward` and calls of submodules.

    Args:
        model: The network.
        tensors: Replacements by parameter or buffer name.
        names: `aliases(model)`, if known already: spares the search for tied weights.
        original: The network that `model` is a private copy of. Raises NotIsolatedError if a pass gives its parameters
            a gradient instead of `tensors`; so a loss that also calls the original is run again, with the draw in it.
        beside: A context that is open for as long, such as the noise of a pass.
    """
    if not tensors:
        with beside:
            yield model
        return
    names = aliases(model) if names is None else names
    undo: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
    recurrent: dict[int, nn.RNNBase] = {}
    unread = [] if original is None or original is model else [*parameters_at(original, tensors).values()]
    before = [(p.grad, None if p.grad is None else p.grad._version) for p in unread]
    try:
        for name, tensor in tensors.items():
            if name not in names:
                raise KeyError(unknown("parameter", name, names))
            for alias in names[name]:
                path, key = _parts(alias)
                module = _submodule(model, path)
                own: Any = module._parameters if key in module._parameters else module._buffers
                undo.append((own, key, own[key]))
                own[key] = tensor
                if isinstance(module, nn.RNNBase):
                    recurrent[id(module)] = module
        _refresh_flat_weights(recurrent.values())
        with beside:
            yield model
    finally:
        for own, key, replaced in reversed(undo):
            own[key] = replaced
        _refresh_flat_weights(recurrent.values())
    for parameter, (gradient, version) in zip(unread, before, strict=True):
        now = parameter.grad
        if now is not gradient or (now is not None and now._version != version):
            parameter.grad = gradient if now is not gradient else None
            raise NotIsolatedError


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """On exit every module has the mode again that it had, also where they differed."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@lru_cache(maxsize=1 << 14)
def _parts(name: str) -> tuple[tuple[str, ...], str]:
    """The modules on the way to a parameter, and its name there."""
    *path, key = name.split(".")
    return tuple(path), key


def _submodule(model: nn.Module, path: tuple[str, ...]) -> nn.Module:
    # As torch's get_submodule, at a tenth of its cost, which matters in steps of small networks.
    found: Any = model
    try:
        for part in path:
            found = found._modules[part]
        return found  # type: ignore[no-any-return]
    except KeyError:
        raise UnsupportedModelError(
            f"The network ({type(model).__name__}) has no module {'.'.join(path)!r} any more: it was replaced or "
            "wrapped (by DataParallel, say) after the posterior was built. Undo that, or build a posterior around the "
            "network as it is now."
        ) from None


def _refresh_flat_weights(modules: Iterable[nn.RNNBase]) -> None:
    # Recurrent layers keep a second list of their weights and read only that one.
    for module in modules:
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
