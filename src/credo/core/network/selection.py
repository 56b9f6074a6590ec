"""Choose parameters of a network by name, and validate networks and parameters that no method supports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.distributed.wrapped_networks import wrapper_problems
from credo.core.errors import UnsupportedModelError
from credo.core.support.name_patterns import chosen_names

Random = str | Sequence[str] | Callable[[str, nn.Parameter], bool]

NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


def join(path: str, key: str) -> str:
    """Name of a parameter in the network; right also where the network itself is the layer (its path is empty)."""
    return f"{path}.{key}" if path else key


def all_names(model: nn.Module) -> list[str]:
    """Names of every parameter: frozen ones too, and all names of tied ones."""
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def random_names(model: nn.Module, random: Random) -> list[str]:
    """Names of the parameters that shall be random. Raises ValueError if none is chosen.

    Args:
        model: The network; parameters with `requires_grad=False` are never chosen.
        random: `"all"`: every trainable parameter but the affine ones of normalisation layers; of these, `"weights"`:
            the ones with two or more dimensions, `"last"`: those of the last layer. Otherwise name globs (`"*"` is
            really everything) or a predicate of name and parameter.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    chosen = _choose(model, trainable, random)
    if not trainable:
        frozen = len(list(model.parameters()))
        way = f"all {frozen} have requires_grad=False; model.requires_grad_(True) changes that" if frozen else "none"
        raise ValueError(f"{type(model).__name__} has no trainable parameter ({way}), so nothing can be random.")
    if not chosen:
        raise ValueError(
            f"random={random!r} chooses no parameter of {type(model).__name__}; trainable ones: {_listing(trainable)}."
        )
    return chosen


def _choose(model: nn.Module, trainable: Mapping[str, nn.Parameter], random: Random) -> list[str]:
    if callable(random):
        return [name for name, p in trainable.items() if random(name, p)]
    if random in ("all", "weights"):
        affine = _norm_affine(model)
        smallest = 2 if random == "weights" else 0
        return [name for name, p in trainable.items() if name not in affine and p.dim() >= smallest]
    if random == "last":
        return _last_layer([name for name in trainable if name not in _norm_affine(model)])
    patterns = [random] if isinstance(random, str) else list(random)
    return chosen_names(trainable, patterns, "parameter or glob in random=")


def _norm_affine(model: nn.Module) -> set[str]:
    return {
        join(path, key)
        for path, module in model.named_modules()
        if isinstance(module, NORMS)
        for key, _ in module.named_parameters(recurse=False)
    }


def _last_layer(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    owner = names[-1].rpartition(".")[0]
    return [name for name in names if name.rpartition(".")[0] == owner]


def plain_network(model: Any) -> Any:
    """The network that `torch.compile` was given, if this is what it returned; else the same."""
    while type(model).__name__ == "OptimizedModule":
        model = model._orig_mod
    return model


def check_model(model: nn.Module) -> None:
    """Raise UnsupportedModelError for a network that no method supports, with all problems in one message."""
    problems = wrapper_problems(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            problems.append(f"{name} is lazy and has no shape yet: run one forward pass first")
        elif not parameter.dtype.is_floating_point:
            problems.append(f"{name} is {parameter.dtype}: only real floating-point parameters are possible")
    problems += [
        f"{join(path, 'weight')} has sparse gradients: only dense ones are possible, make the layer with sparse=False"
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad
    ]
    if problems:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be used: " + "; ".join(problems) + ".")


def one_device(tensors: Mapping[str, Tensor]) -> torch.device:
    """The device all these tensors are on. Raises UnsupportedModelError if they are on several."""
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"Random parameters lie on {sorted(map(str, devices))}; move the network to one device first."
        )
    return devices.pop() if devices else torch.device("cpu")


def _listing(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
