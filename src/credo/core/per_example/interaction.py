"""Whether the rows of a batch act on each other inside a network: then no row's gradient is one example's own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from credo.core.network.isolation import NotIsolatedError
from credo.core.per_example.outputs import Call


def rows_interact(model: nn.Module, call: Call, size: int) -> bool | None:
    """Whether the outputs of some of `size` rows depend on the inputs of others; None where that cannot be found out.

    One more pass on the inputs of the call (all of them: a graph may have fixed its number of nodes), of a copy that
    shares parameters and nothing else, and back to the inputs alone. Looked at are the outputs of every second row and
    the inputs of the others. BatchNorm in training mode lets rows interact as a matter of course: None then.
    """
    if size < 2 or any(_takes_batch_statistics(module) for module in model.modules()):
        return None
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            return _interact(_shadow(model), call, size)
    except NotIsolatedError:
        raise
    except Exception:  # a network that cannot be copied or run once more trains all the same
        return None


def _interact(model: nn.Module, call: Call, size: int) -> bool | None:
    leaves, structure = tree_flatten((call.args, call.options))
    # Copies: the network may write into what it gets.
    leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    # The tensor that says how many rows there are; others may have as many by chance, as a mask over times does.
    first = next(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > 0)
    if not leaves[first].is_floating_point():
        return None
    x = leaves[first].requires_grad_()
    leaves[first] = x.clone()
    args, options = tree_unflatten(leaves, structure)
    outputs = [out for out in tree_leaves(model(*args, **options)) if _has_rows(out, size)]
    if not outputs:
        return None
    # Other factors than 1: the sum of a row may be constant, as of probabilities it is.
    value = torch.stack([(out[::2] * _factors(out[::2])).sum() for out in outputs]).sum()
    (slope,) = torch.autograd.grad(value, x)
    others = slope[1::2]
    return bool(((others != 0) & others.isfinite()).any())


def _has_rows(out: Any, size: int) -> bool:
    return isinstance(out, Tensor) and out.requires_grad and out.dim() > 0 and out.shape[0] == size


def _factors(like: Tensor) -> Tensor:
    return torch.linspace(1, 2, like.numel(), dtype=like.dtype, device=like.device).view(like.shape)


def _shadow(model: nn.Module) -> nn.Module:
    """A copy with the same parameters, but those that a pass itself changes, and with buffers and state of its own."""
    renormed = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None]
    own = {id(module.weight) for module in renormed}
    shared = {id(p): p for module in model.modules() for p in module._parameters.values() if p is not None}
    shadow = copy.deepcopy(model, {key: p for key, p in shared.items() if key not in own})
    for module in shadow.modules():
        module._forward_hooks.clear()  # somebody else's: they would hear of a pass that is none
        for key, hook in list(module._forward_pre_hooks.items()):
            if getattr(hook, "watches_first_pass", False):
                del module._forward_pre_hooks[key]
    return shadow


def _takes_batch_statistics(module: nn.Module) -> bool:
    norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return norm and (module.training or module.running_mean is None)
