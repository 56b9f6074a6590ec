"""The directions of low-rank noise, and the search for its width."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

# Names that `credo.lora` and PEFT give to the factors A and B.
_FACTORS = (("lora_a.", "lora_b."), ("lora_A.", "lora_B."))
# Singular values below this part of the largest are zero: outputs do not depend on those rows of A.
_LEAST = 1e-5
# Where the search for β starts, and within which bounds it stays.
_FIRST, _LOWEST, _HIGHEST = 1e-2, 1e-8, 1e4
# Bisections, each of which halves the logarithm of the interval.
_ROUNDS = 8


def adapter_factors(model: nn.Module) -> dict[str, str]:
    """The name of B for the name of each A of a network's adapters."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    pairs = {name: name.replace(a, b) for name in names for a, b in _FACTORS if a in name}
    return {a: b for a, b in pairs.items() if b in names}


def basis_of(matrix: Tensor, outer: Tensor | None, directions: int) -> Tensor:
    """V·diag(1/d) of A's factor B = U·diag(d)·Vᵀ; without B the first left singular vectors of the matrix.

    Args:
        matrix: A, or a weight matrix; all dimensions but the first count as one.
        outer: B; None: there is none.
        directions: How many singular vectors.
    """
    if outer is None:
        vectors: Tensor = torch.linalg.svd(matrix.flatten(1).float(), full_matrices=False)[0][:, :directions]
        return vectors
    _, values, right = torch.linalg.svd(outer.flatten(1).float(), full_matrices=False)
    inverse = torch.where(values > _LEAST * values.max(), 1 / values, 0.0)
    scaled: Tensor = right.new_zeros(len(matrix), len(matrix))
    scaled[:, : len(inverse)] = right.T * inverse
    return scaled


def largest_width(is_fine: Callable[[float], bool]) -> float:
    """The largest width that is fine, by bisection of its logarithm; 0 if even the smallest is not.

    Args:
        is_fine: Whether a width is; if it is, all smaller ones are taken to be.
    """
    low, high = 0.0, 0.0
    width = _FIRST
    while _LOWEST <= width <= _HIGHEST and not (low and high):
        if is_fine(width):
            low, width = width, 4 * width
        else:
            high, width = width, width / 4
    if not (low and high):
        return low
    for _ in range(_ROUNDS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_fine(middle) else (low, middle)
    return low
