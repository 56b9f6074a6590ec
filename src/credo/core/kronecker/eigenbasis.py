"""EKFAC: the curvature of a layer by its variances along the eigenvectors of its Kronecker factors.

A layer's weight, with the bias as its last column, is a matrix W; a is what goes in, g the gradient of one example's
loss by what comes out, so that Σ g aᵀ over an example's positions is its gradient ∇ by W. K-FAC takes

    F ≈ A ⊗ G = (U_A ⊗ U_G) (Λ_A ⊗ Λ_G) (U_A ⊗ U_G)ᵀ          A = E[a aᵀ] = U_A Λ_A U_Aᵀ,  G = E[g gᵀ] = U_G Λ_G U_Gᵀ

Among all matrices with these eigenvectors it is not the nearest to F. EKFAC (George et al. 2018) is: it keeps the
eigenvectors and puts the variances S of the gradient along them in the place of the products of eigenvalues,

    F ≈ (U_A ⊗ U_G) diag(S) (U_A ⊗ U_G)ᵀ                       S = E[(U_Gᵀ ∇ U_A)²], entry by entry

which leaves out only what F has off the diagonal in this basis. A damping γ is added to S, and then the inverse, its
root and its determinant are those of numbers:

    (F + γ)⁻¹ m = U_G [(U_Gᵀ m U_A) / (S + γ)] U_Aᵀ            F⁻¹ times a matrix m
    U_G [E / √(S + γ)] U_Aᵀ                                    noise of covariance (F + γ)⁻¹ from standard normal E
    U_G² [1 / (S + γ)] (U_A²)ᵀ                                 the diagonal of (F + γ)⁻¹ (squares entry by entry)

When the eigenvectors are replaced by others, S becomes the diagonal, in the new basis, of the matrix that the old basis
and S stand for; signs and order of eigenvectors, which are arbitrary, do not matter then.

Pure functions of tensors; as in `factors`, all take a stack of matrices, one for each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.kronecker.factors import matrix_shape, output_rows, patches, weight_order

# Entries of patches and of single examples' gradients that exist at once.
_CHUNK = 1 << 22

Call = tuple[Tensor, Tensor]
"""A layer's input, and the gradient by its output, [examples, ...] both."""


def eigenbasis(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, none negative, and eigenvectors as columns; of a matrix that is not finite they are not either."""
    finite = matrix.isfinite().flatten(1).all(1)[:, None, None]
    values, vectors = _eigh(torch.where(finite, matrix, 0.0))
    nothing = torch.where(finite, 0.0, torch.nan)
    return values.clamp_min(0) + nothing[..., 0], vectors + nothing


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # No convergence, of badly scaled matrices in single precision.
        values, vectors = (each.to(matrix.dtype) for each in torch.linalg.eigh(matrix.double()))
    return values, vectors


def kronecker_variances(inputs: Tensor, outputs: Tensor) -> Tensor:
    """The variances that A ⊗ G itself has along its eigenvectors, from the eigenvalues of A and G."""
    return outputs.unsqueeze(-1) * inputs.unsqueeze(-2)


def carried_over(variances: Tensor, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Tensor:
    """The diagonal of the same curvature in another basis.

    Args:
        variances: S in the old basis.
        old: The old U_A and U_G.
        new: The new ones.
    """
    by_input, by_output = ((after.mT @ before).square() for before, after in zip(old, new, strict=True))
    return by_output @ variances @ by_input.mT


def into_basis(matrix: Tensor, inputs: Tensor, outputs: Tensor) -> Tensor:
    """U_Gᵀ · matrix · U_A."""
    return outputs.mT @ matrix @ inputs


def out_of_basis(matrix: Tensor, inputs: Tensor, outputs: Tensor) -> Tensor:
    """U_G · matrix · U_Aᵀ."""
    return outputs @ matrix @ inputs.mT


def summed_squares(layer: nn.Module, calls: Sequence[Call], inputs: Tensor, outputs: Tensor, *, bias: bool) -> Tensor:
    """Σ (U_Gᵀ ∇ U_A)² over examples, ∇ the gradient of each, summed over all calls of the layer and their positions.

    Args:
        layer: The layer.
        calls: What it got, and the gradient by what it gave, in each call.
        inputs: U_A.
        outputs: U_G.
        bias: Whether the bias is part of the matrix.
    """
    groups, rows, columns = matrix_shape(layer, bias=bias)
    inputs, count = _in_order_of_patches(layer, inputs, bias=bias), len(calls[0][0])
    is_linear = isinstance(layer, nn.Linear)
    if is_linear and len(calls) == 1 and calls[0][1].numel() == count * rows:  # one position: ∇ = g aᵀ
        x, g = (t.reshape(1, count, -1) for t in calls[0])
        return (g @ outputs).square().mT @ ((F.pad(x, (0, 1), value=1.0) if bias else x) @ inputs).square()
    positions = max(g.numel() // max(1, count * groups * rows) for _, g in calls)
    # Rotate the rows, or the gradients made of them: what is less work.
    early = positions * (rows * rows + columns * columns) < rows * columns * (rows + columns)
    step = max(1, _CHUNK // max(1, groups * max(rows * columns, 0 if is_linear else positions * columns)))
    total = inputs.new_zeros(groups, rows, columns)
    for start in range(0, count, step):
        each: Tensor | None = None
        for whole in calls:
            x, g = (t[start : start + step] for t in whole)
            a = x.reshape(1, -1, x.shape[-1]) if is_linear else patches(layer, x)
            a, b = F.pad(a, (0, 1), value=1.0) if bias else a, output_rows(layer, g)
            if early:
                a, b = a @ inputs, b @ outputs
            a, b = (t.unflatten(1, (len(x), -1)) for t in (a, b))
            found = b.mT @ a
            each = found if each is None else each + found
        assert each is not None
        if not early:
            each = into_basis(each, inputs.unsqueeze(1), outputs.unsqueeze(1))
        total += each.square().sum(1)
    return total


def _in_order_of_patches(layer: nn.Module, basis: Tensor, *, bias: bool) -> Tensor:
    """U_A with its rows in the order of `patches`."""
    if isinstance(layer, nn.Linear):
        return basis
    weight: Tensor = layer.weight  # type: ignore[assignment]
    order = weight_order(weight.shape[1], prod(weight.shape[2:]), basis.shape[-1], basis.device)
    return torch.empty_like(basis).index_copy_(1, order, basis)
