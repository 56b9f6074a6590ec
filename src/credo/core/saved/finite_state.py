"""Check that a state is one of a posterior: all finite, no negative variance or curvature.

A file's digest finds accidental changes only: whoever can write the file can compute a new digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.network.selection import join
from credo.core.posterior import GaussianPosterior, Posterior

_NORM = nn.modules.batchnorm._NormBase


def unsound(posterior: Posterior, state: Mapping[str, Any]) -> list[str]:
    """List what is wrong with the tensors of a state, before it is loaded into the posterior.

    Infinite entries are valid in a network's own buffers, such as attention masks. Modules list tensors that must not
    be negative in `nonnegative`, and matrices whose diagonals must not be in `nonnegative_diagonals`.
    """
    masks = _network_buffers(posterior)
    bad = [name for name, tensor in _tensors(state) if _is_bad(tensor, infinite=name in masks)]
    problems = [f"{name} holds {'NaN' if name in masks else 'NaN or infinite'} values" for name in bad]
    for path, module in posterior.named_modules():
        for key, diagonal in _signs(module):
            tensor = state.get(join(path, key))
            if tensor is not None and bool(((tensor.diagonal(dim1=-2, dim2=-1) if diagonal else tensor) < 0).any()):
                problems.append(f"{join(path, key)} holds negative values, where only squares can be")
    return problems


@torch.no_grad()
def without_std(posterior: Posterior) -> list[str]:
    """List the parameters whose standard deviation is NaN in the posterior's current state."""
    parts = [part for part in posterior.modules() if isinstance(part, GaussianPosterior)]
    stds = [(name, std) for part in parts for name, std in part.std().items()]
    return [f"the posterior variance of {name} is negative or no number" for name, std in stds if _is_bad(std)]


def listed(problems: list[str]) -> str:
    """Join the first three problems, and count the others."""
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


def _is_bad(tensor: Tensor, *, infinite: bool = False) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return bool(tensor.isnan().any()) if infinite else not bool(tensor.isfinite().all())


def _signs(module: nn.Module) -> Iterator[tuple[str, bool]]:
    """Yield names of tensors that must not be negative, and whether only their diagonals must not."""
    own = ("running_var",) if isinstance(module, _NORM) else getattr(module, "nonnegative", ())
    yield from ((name, False) for name in own)
    yield from ((name, True) for name in getattr(module, "nonnegative_diagonals", ()))


def _network_buffers(posterior: Posterior) -> set[str]:
    """Return the names of the networks' buffers except running statistics."""
    parts = [part for part in posterior.modules() if isinstance(part, Posterior)]
    layers = [m for part in parts for m in part.model.modules() if not isinstance(m, _NORM)]
    own = {id(buffer) for layer in layers for buffer in layer._buffers.values() if buffer is not None}
    return {name for name, buffer in posterior.named_buffers(remove_duplicate=False) if id(buffer) in own}


def _tensors(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a state with their names, also those of optimizers inside it."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _tensors(value, f"{name}[{index}]")
