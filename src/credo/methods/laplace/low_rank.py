"""The largest eigenpairs of the curvature H, found batch by batch, and the diagonal of what is left of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from credo.core.distributed.process_group import ProcessGroup
from credo.core.network.flat_layout import Layout
from credo.methods.laplace.last_layer import LastLayer
from credo.methods.laplace.sources import Source, Sums
from credo.methods.laplace.structures import Structure

# Rows that are merged at once, at least: the fewer, the more matrices are decomposed.
_MERGED = 64


class LowRank(Structure):
    """H ≈ C Cᵀ + E: `rank` columns C, and a diagonal E that makes the diagonal exact.

    Rows Jᵀv are merged into the columns some at a time, and the smallest eigenpairs of what results are dropped: exact
    if there are no more than `rank` rows or weights. With D = E/T + P₀ and whitened columns B = D^-½ C/√T,
    P⁻¹ = D^-½ (I − B(I + BᵀB)⁻¹Bᵀ) D^-½.

    Args:
        layout: The random weights.
        last: The last layer, if they are its own.
        device: Where they are.
        rank: How many eigenpairs.
    """

    nonnegative = ("rest",)
    roots = ("whitened", "scales", "inner", "inner_root")
    columns: Tensor
    rest: Tensor
    scales: Tensor
    whitened: Tensor
    inner: Tensor
    inner_root: Tensor

    def __init__(self, layout: Layout, last: LastLayer | None, device: torch.device, rank: int) -> None:
        super().__init__(layout, last)
        self.rank = min(rank, layout.size)
        shapes = {
            "columns": (layout.size, self.rank),
            "rest": (layout.size,),
            "whitened": (layout.size, self.rank),
            "scales": (layout.size,),
            "inner": (self.rank, self.rank),
            "inner_root": (self.rank, self.rank),
        }
        for name, shape in shapes.items():
            zeros = torch.zeros(shape, dtype=layout.dtype, device=device)
            self.register_buffer(name, zeros, persistent=name in ("columns", "rest"))

    def start(self) -> Sums:
        """No columns yet, and squared rows."""
        return {"columns": self.columns[:, :0].clone(), "squares": torch.zeros_like(self.rest)}

    def add_(self, sums: Sums, source: Source) -> None:
        """Merge a batch's `source.rows()` into the columns of the sums, about as many at a time as there are."""
        for rows in source.rows():
            for part in rows.to(self.layout.dtype).split(max(_MERGED, 2 * self.rank)):
                sums["squares"] += part.square().sum(0)
                self._merge_(sums, part.T)

    def reduce_(self, sums: Sums, group: ProcessGroup) -> None:
        """Merge the columns of one process with each set of data after the other, in the same order in all."""
        own, squares = sums["columns"], {"squares": sums["squares"]}
        super().reduce_(squares, group)
        sums["columns"] = own[:, :0]
        for source in range(0, group.world, group.mc_groups):
            self._merge_(sums, group.share(own, source).to(own.device))

    def _merge_(self, sums: Sums, new: Tensor) -> None:
        """The eigenpairs of the Gram matrix of all columns give those of their outer product."""
        columns = torch.cat([sums["columns"], new], 1)
        if columns.shape[1] > self.rank:
            wide = columns.double()
            columns = columns @ torch.linalg.eigh(wide.T @ wide)[1][:, -self.rank :].to(columns)
        sums["columns"] = columns

    def set_(self, sums: Sums, examples: float, data_size: float) -> None:
        """Take it from sums over `examples`, for `data_size` of them."""
        scale, found = data_size / examples, sums["columns"]
        columns = torch.zeros_like(self.columns)
        columns[:, : found.shape[1]] = found * scale**0.5
        self.columns = columns
        self.rest = (sums["squares"] * scale - columns.square().sum(1)).clamp_min(0)

    def scale_(self, factor: float) -> None:
        """Multiply H by a factor."""
        self.columns, self.rest = self.columns * factor**0.5, self.rest * factor

    def update_(self, precision: float | Tensor, temperature: float) -> None:
        """From the eigenvalues s of BᵀB, with `precision` the diagonal of P₀ and T the temperature.

        R = D^-½ (I − B M Bᵀ), where M has the eigenvalues (1 − 1/√(1 + s))/s, here without the division by s.
        """
        rest = self.rest / temperature
        self.scales = (rest + precision).rsqrt()
        self.whitened = self.columns * self.scales.unsqueeze(1) / temperature**0.5
        wide = self.whitened.double()
        values, vectors = torch.linalg.eigh(wide.T @ wide)
        values = values.clamp_min(0)
        root = (1 + values).sqrt()
        self.inner = ((vectors / (1 + values)) @ vectors.T).to(self.columns)
        self.inner_root = ((vectors / (root * (root + 1))) @ vectors.T).to(self.columns)
        self._log_det_ratio = float(values.log1p().sum() + (rest / precision).double().log1p().sum())

    def noise(self, generator: torch.Generator) -> Tensor:
        """D^-½ (z − B M Bᵀz)."""
        z = self._standard_normal(generator)
        return self.scales * (z - self.whitened @ (self.inner_root @ (self.whitened.T @ z)))

    def variance(self) -> Tensor:
        """D⁻¹·(1 − the diagonal of B(I + BᵀB)⁻¹Bᵀ)."""
        known = ((self.whitened @ self.inner) * self.whitened).sum(1)
        return self.scales.square() * (1 - known).clamp_min(0)

    def log_det_ratio(self) -> float:
        """Σ log(1 + s), and that of D."""
        return self._log_det_ratio

    def times_root(self, jacobians: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """J D^-½ (I − B M Bᵀ), all at once."""
        scaled = self._joined(jacobians) * self.scales
        yield scaled - ((scaled @ self.whitened) @ self.inner_root) @ self.whitened.T

    def feature_covariance(self, features: Tensor, outputs: int, *, diagonal: bool = False) -> Tensor:
        """Σ φ²/D on the diagonal, less what the columns know; arguments as in `Structure.feature_covariance`."""
        assert self.last is not None
        scales = self.last.matrix(self.scales, outputs).to(features)
        columns = self.last.matrix(self.scales.unsqueeze(1) * self.whitened, outputs).to(features)
        each = features.square() @ scales.square().T
        seen = torch.einsum("bd,kdr->bkr", features, columns)
        known = seen @ self.inner.to(features)
        if diagonal:
            return (each - (known * seen).sum(-1)).clamp_min(0)
        return torch.diag_embed(each) - known @ seen.mT
