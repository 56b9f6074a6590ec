"""Structures of the curvature H: what of it is kept, and what the Gaussian N(μ, P⁻¹), P = H/T + P₀, needs.

P₀ is diagonal. Every structure has a root R with R Rᵀ = P⁻¹: draws are μ + Rz, the covariance of outputs with Jacobian
J is JR(JR)ᵀ. Vectors over all random weights are in the order of a `Layout`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.distributed.process_group import ProcessGroup
from credo.core.kernels import flat
from credo.core.kronecker.factors import inverse_root
from credo.core.network.flat_layout import Layout
from credo.methods.laplace.last_layer import LastLayer
from credo.methods.laplace.sources import Source, Sums

Spectra = dict[tuple[str, ...], Tensor]


class ReplacedBuffers(nn.Module):
    """A module whose buffers are never changed in place, only replaced, so that copies for predictions share them."""

    replaces_buffers: ClassVar[bool] = True
    roots: ClassVar[tuple[str, ...]] = ()
    """The buffers that predictions read."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, buffer in self._buffers.items():
            if buffer is not None and prefix + name in state_dict:
                self._buffers[name] = torch.empty_like(buffer)  # to be filled in place
        super()._load_from_state_dict(state_dict, prefix, *args)


class Structure(ReplacedBuffers, ABC):
    """A structure of H; zero before the first pass.

    Args:
        layout: The random weights.
        last: The last layer, if they are its own.
    """

    counts_weights: ClassVar[bool] = True
    """Whether Σ (1 − P₀ᵢᵢ·P⁻¹ᵢᵢ) is about the number of weights that the data determine."""

    def __init__(self, layout: Layout, last: LastLayer | None) -> None:
        super().__init__()
        self.layout, self.last = layout, last

    # -- the pass over the data -----------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> Sums:
        """Sums over no data."""

    @abstractmethod
    def add_(self, sums: Sums, source: Source) -> None:
        """Add a batch to the sums."""

    def reduce_(self, sums: Sums, group: ProcessGroup) -> None:
        """Add up the sums of all processes, each of which has had its own data."""
        group.average_([*sums.values()])
        for value in sums.values():
            value.mul_(group.data_groups)  # ranks with the same data have the same sums

    @abstractmethod
    def set_(self, sums: Sums, examples: float, data_size: float) -> None:
        """Take the curvature from sums over all data.

        Args:
            sums: The sums.
            examples: How many examples they are over.
            data_size: How many examples H shall be of.
        """

    def prepare_(self) -> None:
        """Find what depends on H alone, once it has been loaded."""

    @abstractmethod
    def scale_(self, factor: float) -> None:
        """Multiply H by a factor."""

    # -- the Gaussian ---------------------------------------------------------------------------------------------

    def check_prior(self, precision: float | Tensor) -> None:
        """Raise ValueError for a precision of the prior, one number or a vector, that the structure does not allow."""

    @abstractmethod
    def update_(self, precision: float | Tensor, temperature: float) -> None:
        """Find the root of (H/T + P₀)⁻¹.

        Args:
            precision: The diagonal of P₀, one number or a vector.
            temperature: T.
        """

    @abstractmethod
    def noise(self, generator: torch.Generator) -> Tensor:
        """R z of standard normal z, [weights]."""

    @abstractmethod
    def variance(self) -> Tensor:
        """The diagonal of P⁻¹, [weights]."""

    @abstractmethod
    def log_det_ratio(self) -> float:
        """log|P| − log|P₀|."""

    def spectra(self) -> Spectra | None:
        """Eigenvalues of H, by the parameters of each of its independent blocks; None if they are not known."""
        return None

    # -- functions of the weights ----------------------------------------------------------------------------------

    @abstractmethod
    def times_root(self, jacobians: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """J R of Jacobians by name, [batch, outputs, *shape]: its columns [batch, outputs, weights], some at a time."""

    def covariance(self, jacobians: Mapping[str, Tensor], *, diagonal: bool = False) -> Tensor:
        """J P⁻¹ Jᵀ, [batch, outputs, outputs].

        Args:
            jacobians: J by name, [batch, outputs, *shape].
            diagonal: Only its diagonal, [batch, outputs].
        """
        found: Tensor | None = None
        for root in self.times_root(jacobians):
            own = root.square().sum(-1) if diagonal else root @ root.mT
            found = own if found is None else found.add_(own)
        assert found is not None
        return found

    @abstractmethod
    def feature_covariance(self, features: Tensor, outputs: int, *, diagonal: bool = False) -> Tensor:
        """`covariance` of the outputs of a last layer f = Wφ, whose Jacobian φ ⊗ I is never made.

        Args:
            features: φ, [batch, inputs].
            outputs: How many outputs there are.
            diagonal: As in `covariance`.
        """

    @property
    def spread_count(self) -> int:
        """Numbers that a prediction needs: those of the root, not of H itself."""
        parts = [part for part in self.modules() if isinstance(part, ReplacedBuffers)]
        return sum(int(getattr(part, name).numel()) for part in parts for name in part.roots)

    # -- inner -----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return next(self.buffers()).device

    def _standard_normal(self, generator: torch.Generator) -> Tensor:
        return flat.normal(self.layout.size, generator, device=self.device, dtype=self.layout.dtype)

    def _joined(self, jacobians: Mapping[str, Tensor]) -> Tensor:
        """Jacobians by name as [batch, outputs, weights]."""
        return torch.cat([jacobians[name].flatten(2).to(self.layout.dtype) for name in self.layout.names], -1)


class Diagonal(Structure):
    """The diagonal of H: P⁻¹ᵢᵢ = 1/(Hᵢᵢ/T + P₀ᵢᵢ).

    Args:
        layout: The random weights.
        last: The last layer, if they are its own.
        device: Where they are.
    """

    nonnegative = ("curvature",)
    roots = ("std",)
    counts_weights = False
    curvature: Tensor
    std: Tensor

    def __init__(self, layout: Layout, last: LastLayer | None, device: torch.device) -> None:
        super().__init__(layout, last)
        for name in ("curvature", "std"):
            zeros = torch.zeros(layout.size, dtype=layout.dtype, device=device)
            self.register_buffer(name, zeros, persistent=name == "curvature")

    def start(self) -> Sums:
        """Σ (Jᵀv)²."""
        return {"curvature": torch.zeros_like(self.curvature)}

    def add_(self, sums: Sums, source: Source) -> None:
        """Add a batch's `source.squares()` to the sums."""
        sums["curvature"] += self.layout.flatten(source.squares())

    def set_(self, sums: Sums, examples: float, data_size: float) -> None:
        """Take it from sums over `examples`, for `data_size` of them."""
        self.curvature = sums["curvature"] * (data_size / examples)

    def scale_(self, factor: float) -> None:
        """Multiply H by a factor."""
        self.curvature = self.curvature * factor

    def update_(self, precision: float | Tensor, temperature: float) -> None:
        """σ = 1/√(h/T + precision), with T the temperature; log|P| − log|P₀| needs the precision again."""
        self.std = (self.curvature / temperature + precision).rsqrt()
        self._log_det_ratio = float((self.curvature / temperature / precision).double().log1p().sum())

    def noise(self, generator: torch.Generator) -> Tensor:
        """σ z."""
        return self.std * self._standard_normal(generator)

    def variance(self) -> Tensor:
        """σ²."""
        return self.std.square()

    def log_det_ratio(self) -> float:
        """Σ log(1 + h/(T·P₀))."""
        return self._log_det_ratio

    def spectra(self) -> Spectra:
        """Every weight is on its own; its tensor is one block all the same."""
        return {(name,): h.flatten() for name, h in self.layout.split(self.curvature, cast=False).items()}

    def times_root(self, jacobians: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """J σ, parameter by parameter."""
        for name, std in self.layout.split(self.std, cast=False).items():
            yield (jacobians[name] * std).flatten(2)

    def feature_covariance(self, features: Tensor, outputs: int, *, diagonal: bool = False) -> Tensor:
        """Outputs are independent: Σ φ²σ² for each; arguments as in `Structure.feature_covariance`."""
        assert self.last is not None
        variance = features.square() @ self.last.matrix(self.variance(), outputs).T.to(features)
        return variance if diagonal else torch.diag_embed(variance)


class Full(Structure):
    """All of H, in double precision.

    Args:
        layout: The random weights.
        last: The last layer, if they are its own.
        device: Where they are.
    """

    nonnegative_diagonals = ("curvature",)
    roots = ("root",)
    curvature: Tensor
    root: Tensor

    def __init__(self, layout: Layout, last: LastLayer | None, device: torch.device) -> None:
        super().__init__(layout, last)
        for name in ("curvature", "root"):
            zeros = torch.zeros(layout.size, layout.size, dtype=torch.double, device=device)
            self.register_buffer(name, zeros, persistent=name == "curvature")

    def start(self) -> Sums:
        """Σ Jᵀv vᵀJ."""
        return {"curvature": torch.zeros_like(self.curvature)}

    def add_(self, sums: Sums, source: Source) -> None:
        """Add a batch's `source.gram()` to the sums."""
        sums["curvature"] += source.gram()

    def set_(self, sums: Sums, examples: float, data_size: float) -> None:
        """Take it from sums over `examples`, for `data_size` of them."""
        self.curvature = sums["curvature"] * (data_size / examples)

    def scale_(self, factor: float) -> None:
        """Multiply H by a factor."""
        self.curvature = self.curvature * factor

    def update_(self, precision: float | Tensor, temperature: float) -> None:
        """R = L⁻ᵀ of the Cholesky factor L of H/T + P₀, with `precision` the diagonal of P₀ and T the temperature."""
        whole = self.curvature / temperature
        prior = torch.as_tensor(precision, dtype=whole.dtype, device=whole.device).expand(len(whole))
        whole.diagonal().add_(prior)
        self.root = inverse_root(whole.unsqueeze(0), whole.new_zeros(1))[0]
        self._log_det_ratio = -float(2 * self.root.diagonal().log().sum() + prior.log().sum())

    def noise(self, generator: torch.Generator) -> Tensor:
        """L⁻ᵀ z."""
        return (self.root @ self._standard_normal(generator).to(self.root)).to(self.layout.dtype)

    def variance(self) -> Tensor:
        """Squared norms of the rows of R."""
        return self.root.square().sum(1).to(self.layout.dtype)

    def log_det_ratio(self) -> float:
        """From the Cholesky factor."""
        return self._log_det_ratio

    def spectra(self) -> Spectra:
        """All weights are one block."""
        return {self.layout.names: torch.linalg.eigvalsh(self.curvature).clamp_min(0)}

    def times_root(self, jacobians: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """J L⁻ᵀ, all at once."""
        joined = self._joined(jacobians)
        yield joined @ self.root.to(joined)

    def feature_covariance(self, features: Tensor, outputs: int, *, diagonal: bool = False) -> Tensor:
        """Σ φᵢ R over the rows of R that belong to each output; arguments as in `Structure.feature_covariance`."""
        assert self.last is not None
        rows = self.last.matrix(self.root, outputs).to(features)  # [outputs, inputs, weights]
        root = torch.einsum("bd,kdp->bkp", features, rows)
        return root.square().sum(-1) if diagonal else root @ root.mT
