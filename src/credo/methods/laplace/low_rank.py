"""The largest eigenpairs of the curvature H, found batch by batch: H ≈ C Cᵀ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from credo.core.distributed.process_group import ProcessGroup
from credo.core.network.flat_layout import Layout
from credo.methods.laplace.last_layer import LastLayer
from credo.methods.laplace.sources import Source, Sums
from credo.methods.laplace.structures import Spectra, Structure


class LowRank(Structure):
    """The `rank` largest eigenpairs of H; in all other directions the data say nothing, and the prior stays.

    Rows Jᵀv are merged into the columns C some at a time, and the smallest eigenpairs of what results are dropped:
    exact if there are no more than `rank` rows or weights. With whitened columns B = P₀^-½ C/√T,
    P⁻¹ = P₀^-½ (I − B(I + BᵀB)⁻¹Bᵀ) P₀^-½.

    Args:
        layout: The random weights.
        last: The last layer, if they are its own.
        device: Where they are.
        rank: How many eigenpairs.
    """

    columns: Tensor
    scales: Tensor
    whitened: Tensor
    inner: Tensor
    inner_root: Tensor

    def __init__(self, layout: Layout, last: LastLayer | None, device: torch.device, rank: int) -> None:
        super().__init__(layout, last)
        self.rank = min(rank, layout.size)
        shapes = {
            "columns": (layout.size, self.rank),
            "whitened": (layout.size, self.rank),
            "scales": (layout.size,),
            "inner": (self.rank, self.rank),
            "inner_root": (self.rank, self.rank),
        }
        for name, shape in shapes.items():
            zeros = torch.zeros(shape, dtype=layout.dtype, device=device)
            self.register_buffer(name, zeros, persistent=name == "columns")

    def start(self) -> Sums:
        """No columns yet."""
        return {"columns": self.columns[:, :0].clone()}

    def add_(self, sums: Sums, source: Source) -> None:
        """Merge a batch's `source.rows()` into the columns of the sums, about as many at a time as there are."""
        for rows in source.rows():
            for part in rows.split(max(1, 2 * self.rank)):
                self._merge_(sums, part.T.to(self.layout.dtype))

    def reduce_(self, sums: Sums, group: ProcessGroup) -> None:
        """Merge the columns of one process with each set of data after the other, in the same order in all."""
        own = sums["columns"]
        sums["columns"] = own[:, :0]
        for source in range(0, group.world, group.mc_groups):
            self._merge_(sums, group.share(own, source).to(own.device))

    def _merge_(self, sums: Sums, new: Tensor) -> None:
        """The eigenpairs of the Gram matrix of all columns are those of their outer product."""
        columns = torch.cat([sums["columns"], new], 1)
        if columns.shape[1] > self.rank:
            gram = columns.double().T @ columns.double()
            columns = columns @ torch.linalg.eigh(gram)[1][:, -self.rank :].to(columns)
        sums["columns"] = columns

    def set_(self, sums: Sums, examples: float, data_size: float) -> None:
        """Take it from sums over `examples`, for `data_size` of them."""
        columns = torch.zeros_like(self.columns)
        found = sums["columns"] * (data_size / examples) ** 0.5
        columns[:, : found.shape[1]] = found
        self.columns = columns

    def scale_(self, factor: float) -> None:
        """Multiply H by a factor."""
        self.columns = self.columns * factor**0.5

    def update_(self, precision: float | Tensor, temperature: float) -> None:
        """From the eigenvalues s of BᵀB, with `precision` the diagonal of P₀ and T the temperature.

        R = P₀^-½ (I − B M Bᵀ), where M has the eigenvalues (1 − 1/√(1 + s))/s, here without the division by s.
        """
        prior = torch.as_tensor(precision, dtype=self.columns.dtype, device=self.columns.device)
        self.scales = prior.rsqrt().expand(self.layout.size).contiguous()
        self.whitened = self.columns * self.scales.unsqueeze(1) / temperature**0.5
        wide = self.whitened.double()
        values, vectors = torch.linalg.eigh(wide.T @ wide)
        values = values.clamp_min(0)
        root = (1 + values).sqrt()
        self.inner = ((vectors / (1 + values)) @ vectors.T).to(self.columns)
        self.inner_root = ((vectors / (root * (root + 1))) @ vectors.T).to(self.columns)
        self._log_det_ratio = float(values.log1p().sum())

    def noise(self, generator: torch.Generator) -> Tensor:
        """P₀^-½ (z − B M Bᵀz)."""
        z = self._standard_normal(generator)
        return self.scales * (z - self.whitened @ (self.inner_root @ (self.whitened.T @ z)))

    def variance(self) -> Tensor:
        """P₀⁻¹·(1 − the diagonal of B(I + BᵀB)⁻¹Bᵀ)."""
        known = ((self.whitened @ self.inner) * self.whitened).sum(1)
        return self.scales.square() * (1 - known).clamp_min(0)

    def log_det_ratio(self) -> float:
        """Σ log(1 + s)."""
        return self._log_det_ratio

    def spectra(self) -> Spectra:
        """All weights are one block; there are `rank` eigenvalues."""
        wide = self.columns.double()
        return {self.layout.names: torch.linalg.eigvalsh(wide.T @ wide).clamp_min(0)}

    def times_root(self, jacobians: Mapping[str, Tensor]) -> Tensor:
        """J P₀^-½ (I − B M Bᵀ)."""
        scaled = self._joined(jacobians) * self.scales
        return scaled - ((scaled @ self.whitened) @ self.inner_root) @ self.whitened.T

    def feature_covariance(self, features: Tensor, outputs: int, *, diagonal: bool = False) -> Tensor:
        """Σ φ²/P₀ on the diagonal, less what the data know; arguments as in `Structure.feature_covariance`."""
        assert self.last is not None
        scales = self.last.matrix(self.scales, outputs).to(features)
        columns = self.last.matrix(self.scales.unsqueeze(1) * self.whitened, outputs).to(features)
        prior = features.square() @ scales.square().T
        seen = torch.einsum("bd,kdr->bkr", features, columns)
        known = seen @ self.inner.to(features)
        if diagonal:
            return (prior - (known * seen).sum(-1)).clamp_min(0)
        return torch.diag_embed(prior) - known @ seen.mT
