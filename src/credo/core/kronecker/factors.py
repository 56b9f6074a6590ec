"""Kronecker factors of a layer's Fisher matrix, and their inverses: pure functions of tensors.

A layer's weight, with the bias as its last column, is a matrix [groups, outputs, inputs]. Its Fisher matrix is taken as
A ⊗ G, A the second moments of the inputs (a 1 appended for the bias), G those of the gradients by the outputs
(Martens and Grosse 2015). A convolution's A is summed over positions, its G averaged over them (Grosse and Martens
2016). All functions take a stack of matrices: one for each group of a grouped convolution, one for all other layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.errors import NonFiniteError
from credo.core.kernels import flat
from credo.core.kronecker.shared_rows import rows_are_shared, shared_row_moments

# Entries of a convolution's patches that exist at once.
_CHUNK = 1 << 22
# Tenfold damping each time: by then it outweighs any matrix of finite second moments.
_TRIES = 12
# From this many rows on, triangles and symmetric matrices are made in blocks: at most so many, and not of fewer rows.
_LARGE, _BLOCKS, _LEAST = 256, 8, 128
# The same for inverses: of smaller ones, fewer operators are worth more.
LARGE_INVERSE = 512
# Products from which on a matrix of second moments is made so.
_LARGE_GRAM = 1 << 26


def matrix_shape(layer: nn.Module, *, bias: bool) -> tuple[int, int, int]:
    """Groups, outputs and inputs of a layer's matrix."""
    weight: Any = layer.weight
    groups: Any = getattr(layer, "groups", 1)
    return groups, weight.shape[0] // groups, weight[0].numel() + bias


def to_matrix(weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """The matrix [groups, outputs, inputs] of weight and bias, which is the last column.

    Args:
        weight: The weight.
        bias: The bias, if it is part of the matrix.
        groups: Groups of a grouped convolution.
    """
    rows = weight.reshape(groups, weight.shape[0] // groups, -1)
    return rows if bias is None else torch.cat([rows, bias.reshape(groups, -1, 1)], dim=-1)


def from_matrix(matrix: Tensor, shape: torch.Size, *, bias: bool) -> tuple[Tensor, Tensor | None]:
    """Undo `to_matrix`.

    Args:
        matrix: The matrix.
        shape: The shape of the weight.
        bias: Whether the last column is a bias.
    """
    if not bias:
        return matrix.reshape(shape), None
    return matrix[..., :-1].reshape(shape), matrix[..., -1].reshape(-1)


# -- second moments --------------------------------------------------------------------------------------------------


def input_moments(layer: nn.Module, x: Tensor, *, positions: int, bias: bool, weights: Tensor | None = None) -> Tensor:
    """Σ w·a aᵀ over examples and positions.

    Args:
        layer: The layer.
        x: Its input, a.
        positions: Output positions of an example, as many as there are patches of its image.
        bias: Whether the bias is part of the matrix.
        weights: Weights w of the examples; None: 1.
    """
    if isinstance(layer, nn.Linear):
        rows = x.reshape(-1, x.shape[-1])
        rows = torch.cat([rows, flat.one(x.device, x.dtype).expand(len(rows), 1)], 1) if bias else rows
        return _moments(rows.unsqueeze(0), weights=weights)
    groups, _, size = matrix_shape(layer, bias=bias)
    is_shared = rows_are_shared(layer, x, positions=positions, size=size)
    step, total = max(1, _CHUNK // max(1, groups * size * positions)), None
    for index, part in enumerate(x.split(step)):
        own = None if weights is None else weights[index * step :][: len(part)]
        if is_shared:
            found = shared_row_moments(layer, part, bias=bias, weights=own)
        else:
            found = _moments(patches(layer, part), bias=bias, weights=own)
        total = found if total is None else total.add_(found)
    assert total is not None
    weight: Any = layer.weight
    order = weight_order(weight.shape[1], prod(weight.shape[2:]), size, x.device)
    return total[:, order.unsqueeze(1), order]


def output_moments(layer: nn.Module, g: Tensor) -> Tensor:
    """Σ g gᵀ over examples and positions, of the gradient `g` by the layer's output."""
    return _moments(output_rows(layer, g))


def row_count(layer: nn.Module, g: Tensor) -> int:
    """How many examples and positions the gradient `g` by the layer's output has."""
    return output_rows(layer, g).shape[1]


def output_rows(layer: nn.Module, g: Tensor) -> Tensor:
    """Gradients by a layer's output as [groups, examples · positions, outputs]."""
    if isinstance(layer, nn.Linear):
        return g.reshape(1, -1, g.shape[-1])
    groups: Any = getattr(layer, "groups", 1)
    return g.reshape(len(g), groups, g.shape[1] // groups, -1).permute(1, 0, 3, 2).flatten(1, 2)


def patches(layer: nn.Module, x: Tensor) -> Tensor:
    """The receptive field of each output position, [groups, examples · positions, kernel · channels / groups].

    Channels last, unlike in the weight, so that every copied run is long.
    """
    conv: Any = layer
    if any(conv._reversed_padding_repeated_twice):
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
    x = x.unflatten(1, (conv.groups, -1)).movedim(2, -1).contiguous()
    spatial = len(conv.kernel_size)
    for dim, (size, stride, dilation) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True), 2):
        x = x.unfold(dim, dilation * (size - 1) + 1, stride)[..., ::dilation]
    # [examples, groups, *positions, channels, *kernel]
    channels = 2 + spatial
    x = x.permute(1, 0, *range(2, channels), *range(channels + 1, x.dim()), channels)
    return x.reshape(conv.groups, prod(x.shape[1:channels]), -1)


@lru_cache(maxsize=256)
def weight_order(channels: int, kernel: int, size: int, device: torch.device) -> Tensor:
    """Indices of the weight's entries, and of the bias after them, in `patches`.

    Args:
        channels: Of the input.
        kernel: Positions of the kernel.
        size: Columns of `patches`.
        device: Where they are made.
    """
    with torch.inference_mode(False):
        order = torch.arange(channels * kernel, device=device).view(-1, channels).t().flatten()
        return torch.cat([order, torch.arange(len(order), size, device=device)])


def _moments(rows: Tensor, *, bias: bool = False, weights: Tensor | None = None) -> Tensor:
    """Σ w·r rᵀ over the rows of each matrix [groups, rows, size]; with a 1 appended to each row for the bias.

    `weights` are those of equally long runs of rows; None: 1 for all.
    """
    groups, count, size = rows.shape
    total: float | Tensor = count
    if weights is None:
        inner = gram(rows)
    else:
        weights = weights.to(rows).repeat_interleave(count // max(1, len(weights)))
        inner, total = _moments(rows * weights.sqrt().unsqueeze(1)), weights.sum()
        rows = rows * weights.unsqueeze(1)
    if not bias:
        return inner
    result = rows.new_empty(groups, size + 1, size + 1)
    result[:, :size, :size] = inner
    result[:, :size, size] = result[:, size, :size] = rows.sum(1)
    result[:, size, size] = total
    return result


def gram(rows: Tensor) -> Tensor:
    """RᵀR of each matrix R; of large ones only the blocks on and below the diagonal are multiplied out."""
    count, size = rows.shape[-2:]
    if size < _LARGE or count * size**2 < _LARGE_GRAM:
        return rows.mT @ rows
    result = rows.new_empty(len(rows), size, size)
    for own, on in _blocks(size):
        block = rows[..., on].mT @ rows[..., own]
        result[:, on, own], result[:, own, on] = block, block.mT
    return result


def _blocks(size: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of so many rows: each block, and all from it on."""
    step = max(_LEAST, -(-size // _BLOCKS))
    return ((slice(i, min(i + step, size)), slice(i, size)) for i in range(0, size, step))


# -- damping and inverses ----------------------------------------------------------------------------------------------


def factored_dampings(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], dampings: Sequence[float | Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """π√γ and √γ/π for A and G of several layers: their product is γ, and both matrices are damped alike.

    π² is the mean eigenvalue of A over that of G (Martens and Grosse 2015); 1 where one of them is zero.

    Args:
        inputs: A of each layer.
        outputs: G of each layer.
        dampings: γ of each layer; a number, or one for each of its groups.
    """
    sizes = [len(matrix) for matrix in inputs]
    a, g = _mean_eigenvalues([*inputs, *outputs]).tensor_split(2)
    damping: float | Tensor = dampings[0]
    if any(isinstance(each, Tensor) or each != damping for each in dampings):
        damping = torch.cat([a.new_ones(n) * d for n, d in zip(sizes, dampings, strict=True)])
    found = [share.split(sizes) for share in _factored(a, g, damping)]
    by_input, by_output = ([part.to(matrix.dtype) for part, matrix in zip(one, inputs, strict=True)] for one in found)
    return by_input, by_output


def _factored(inputs: Tensor, outputs: Tensor, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    ratio = (inputs / outputs).sqrt()
    ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)
    root = damping.to(ratio).sqrt() if isinstance(damping, Tensor) else math.sqrt(damping)
    return root * ratio, root / ratio


def _mean_eigenvalues(matrices: Sequence[Tensor]) -> Tensor:
    """Those of all matrices of all stacks in a row."""
    if any(len(matrix) > 1 for matrix in matrices):
        return torch.cat([_mean_eigenvalue(matrix) for matrix in matrices])
    sizes = [matrix.shape[-1] for matrix in matrices]
    diagonals = torch.cat([matrix[0].diagonal() for matrix in matrices])
    # Second moments: none is negative, so that their sum is a norm, which many vectors get in one operation.
    return torch.stack(torch._foreach_div(torch._foreach_norm(diagonals.split(sizes), 1), sizes))


def _mean_eigenvalue(matrix: Tensor) -> Tensor:
    return diagonal(matrix).mean(-1)


def inverse_root(matrix: Tensor, damping: Tensor) -> Tensor:
    """Upper triangles L with L Lᵀ = (matrix + damping·I)⁻¹.

    Where rounding has left no positive definite matrix, that matrix gets more damping, tenfold until there is one.
    """
    eye, least = _eye(matrix), torch.finfo(matrix.dtype).eps * _mean_eigenvalue(matrix).clamp_min(1e-6)
    for _ in range(_TRIES):
        lower, failed = _damped_cholesky(matrix, damping, eye)
        if not bool(failed.any()):
            return _inverse_of(lower, eye)
        damping = torch.where(failed > 0, 10 * torch.maximum(damping, least), damping)
    raise NonFiniteError(f"No Cholesky factor of a {list(matrix.shape)} curvature exists, whatever its damping.")


def inverse_roots(matrices: Sequence[Tensor], dampings: Sequence[Tensor]) -> list[Tensor]:
    """`inverse_root` of several matrices; one number is read for all of them.

    A matrix that is not finite has a root that is not finite either.

    Args:
        matrices: The matrices.
        dampings: Their dampings.
    """
    largest = _eye(max(matrices, key=lambda matrix: matrix.shape[-1]))
    eyes = [largest[: matrix.shape[-1], : matrix.shape[-1]].to(matrix.dtype) for matrix in matrices]
    tried = [_damped_cholesky(*given) for given in zip(matrices, dampings, eyes, strict=True)]
    roots = [_inverse_of(lower, eye) for (lower, _), eye in zip(tried, eyes, strict=True)]
    if bool(torch.cat([failed for _, failed in tried]).any()):
        for index, (matrix, damping) in enumerate(zip(matrices, dampings, strict=True)):
            is_finite = bool(matrix.isfinite().all() & damping.isfinite().all())
            roots[index] = inverse_root(matrix, damping) if is_finite else torch.full_like(matrix, math.nan)
    return roots


def _eye(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def _damped_cholesky(matrix: Tensor, damping: Tensor, eye: Tensor) -> tuple[Tensor, Tensor]:
    """The lower triangles of matrix + damping·I, and for each a number that is not 0 where there is none."""
    if matrix.shape[-1] < LARGE_INVERSE:
        damped = torch.addcmul(matrix, damping[..., None, None], eye)
    else:
        damped = matrix.clone()
        diagonal(damped).add_(damping.unsqueeze(-1))
    lower, failed = torch.linalg.cholesky_ex(damped)
    return lower, failed


def _inverse_of(lower: Tensor, eye: Tensor) -> Tensor:
    """The inverse of lower triangles, transposed; of large ones, only the columns' parts below the diagonal's block."""
    if lower.shape[-1] < LARGE_INVERSE:
        inverse: Tensor = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
        return inverse.mT.contiguous()
    result = torch.zeros_like(lower)
    for own, on in _blocks(lower.shape[-1]):
        columns = eye[on, own].expand(len(lower), -1, -1)
        result[:, own, on] = torch.linalg.solve_triangular(lower[:, on, on], columns, upper=False).mT
    return result


def product(left: Tensor, middle: Tensor, right: Tensor) -> Tensor:
    """left · middle · rightᵀ: a preconditioned gradient from inverses."""
    return left @ middle @ right.mT


def root_product(left: Tensor, middle: Tensor, right: Tensor) -> Tensor:
    """The same for upper triangles, without most of their zeros: noise of the right covariance from roots."""
    return _times_upper(_times_upper(middle.mT, left).mT, right)


def own_product(root: Tensor) -> Tensor:
    """L Lᵀ of upper triangles; of large ones, half of the blocks and from each block's first column on."""
    size = root.shape[-1]
    if size < LARGE_INVERSE:
        return _times_upper(root, root)
    result = torch.empty_like(root)
    for own, on in _blocks(size):
        block = root[:, : own.stop, on] @ root[:, own, on].mT
        result[:, : own.stop, own], result[:, own, : own.start] = block, block[:, : own.start].mT
    return result


def _times_upper(x: Tensor, upper: Tensor) -> Tensor:
    """x · upperᵀ of upper triangles: of large ones, only the columns from each block's first on."""
    size = upper.shape[-1]
    if size < _LARGE:
        return x @ upper.mT
    return torch.cat([x[..., on] @ upper[..., own, on].mT for own, on in _blocks(size)], -1)


def diagonal(matrix: Tensor) -> Tensor:
    """The diagonal of each matrix."""
    return matrix.diagonal(dim1=-2, dim2=-1)


def inner_product(left: Sequence[Tensor], right: Sequence[Tensor], *, may_read: bool) -> Tensor:
    """Σ of all entries' products, in double precision.

    Args:
        left: Tensors, in lower precision perhaps, as products under autocast are.
        right: Tensors of the same shapes.
        may_read: Whether the result may be read now, to try single precision first, which seldom overflows.
    """
    flat = [[tensor.reshape(-1) for tensor in tensors] for tensors in (left, right)]
    if may_read:
        pairs = zip(*flat, strict=True)
        total = torch.stack([torch.dot(a.to(b.dtype), b).double() for a, b in pairs]).sum()
        if bool(total.isfinite()):
            return total
    return torch.dot(*(torch.cat(tensors).double() for tensors in flat))
