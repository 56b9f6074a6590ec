"""Blocks of EKFAC: eigenvectors of a layer's factors and variances along them; `eigenbasis` has the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from credo.core.kronecker.eigenbasis import carried_over, eigenbasis, into_basis, kronecker_variances, out_of_basis
from credo.core.kronecker.layer_rules import KroneckerLayer
from credo.methods.kfac.blocks import LayerBlock, Tensors
from credo.methods.kfac.measured import Parts


class EigenBlock(LayerBlock):
    """A layer's weight and bias: C = (U_A ⊗ U_G) diag(S) (U_A ⊗ U_G)ᵀ (George et al. 2018).

    Before the first eigenvectors S is zero; the first S is that of A ⊗ G.

    Args:
        layer: The layer.
        is_random: Whether its parameters have noise and prior.
    """

    averages = ("inputs", "outputs", "variances")
    inverses = ("input_basis", "output_basis", "variances", "root")
    nonnegative = ("variances", "root")
    input_basis: Tensor
    output_basis: Tensor
    variances: Tensor
    root: Tensor

    def __init__(self, layer: KroneckerLayer, is_random: bool) -> None:
        super().__init__(layer, is_random)
        self.keys = (*layer.keys, layer.variances)

    def _register_inverse(self, kind: str, weight: Tensor, size: int) -> None:
        self._register(f"{kind}_basis", weight, size, size)

    def _register_whole(self, weight: Tensor) -> None:
        for name in ("variances", "root"):
            self._register(name, weight, *self.momentum.shape[1:])

    @property
    def basis(self) -> tuple[Tensor, Tensor]:
        """U_A and U_G."""
        return self.input_basis, self.output_basis

    @staticmethod
    def inverted(
        blocks: Sequence[Any], curvatures: Sequence[Tensors], dampings: Sequence[float | Tensor]
    ) -> list[Tensors]:
        """New U_A and U_G, and S of A ⊗ G.

        Args:
            blocks: The blocks.
            curvatures: A, G and S of each.
            dampings: Not needed yet.
        """
        made: list[Tensors] = []
        for inputs, outputs, _ in curvatures:
            (by_input, input_basis), (by_output, output_basis) = eigenbasis(inputs), eigenbasis(outputs)
            made.append((input_basis, output_basis, kronecker_variances(by_input, by_output)))
        return made

    def completed(self, made: Tensors | None, curvature: Tensors | None, damping: float | Tensor) -> Tensors | None:
        """U_A, U_G, S and 1/√(S + damping); a damping that differs within a group enters by its mean there."""
        if made is None and curvature is None:
            return None
        inputs, outputs = self.basis
        variances = self.variances if curvature is None else curvature[2]
        if made is not None:
            carried = carried_over(variances, self.basis, (made[0], made[1]))
            # S without eigenvectors is zero; with them, that of a layer without gradients is, too.
            variances = torch.where(variances.any(), carried, made[2])
            inputs, outputs = made[:2]
        each = damping.mean((-2, -1), keepdim=True) if isinstance(damping, Tensor) else damping
        return inputs, outputs, variances, (variances + each).clamp_min(1e-12).rsqrt()

    def precondition(self, matrix: Tensor, inverse: Tensors) -> Tensor:
        """U_G [(U_Gᵀ matrix U_A) / (S + damping)] U_Aᵀ."""
        basis = inverse[:2]
        return out_of_basis(into_basis(matrix, *basis) * inverse[3].square(), *basis)

    def correlate(self, noise: Tensor) -> Tensor:
        """U_G [noise / √(S + damping)] U_Aᵀ."""
        return out_of_basis(noise * self.root, *self.basis)

    def variance(self, inverse: Tensors) -> Tensor:
        """U_G² [1 / (S + damping)] (U_A²)ᵀ."""
        inputs, outputs, _, root = inverse
        return out_of_basis(root.square(), inputs.square(), outputs.square())

    def parts(self, inverse: Tensors) -> Parts:
        """1/√(S + damping)."""
        return Parts(inverse[3:], sums=[inverse[3].log().sum(dtype=torch.float64)])

    def trace_and_log_determinant(self, squares: Sequence[float], logs: Sequence[float]) -> tuple[float, float]:
        """Σ 1/(S + damping) and −Σ log(S + damping)."""
        return squares[0], 2 * logs[0]
