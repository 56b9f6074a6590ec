"""Kronecker factors of the curvature: H ≈ A ⊗ G for each layer, to which the prior is added exactly.

With P₀ = D the same for all outputs, P = D^½(D^-½AD^-½ ⊗ G/T + I)D^½. The eigenvectors U, V and eigenvalues l, m of the
two factors give R = (V ⊗ D^-½U)(1 + m l)^-½: no damping is shared out between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from credo.core.kronecker.factors import from_matrix, matrix_shape, to_matrix
from credo.core.kronecker.layer_rules import KroneckerLayer, kronecker_layers
from credo.core.network.flat_layout import Layout
from credo.core.network.substitute import aliases
from credo.methods.laplace.last_layer import LastLayer
from credo.methods.laplace.sources import Source, Sums
from credo.methods.laplace.structures import Diagonal, ReplacedBuffers, Spectra, Structure


class Factors(ReplacedBuffers):
    """A layer's weight and bias as a matrix [groups, outputs, inputs], with its two factors A and G.

    Args:
        layer: The layer.
    """

    nonnegative_diagonals = ("inputs", "outputs")
    roots = ("input_basis", "output_basis", "scale")
    inputs: Tensor
    outputs: Tensor
    input_values: Tensor
    output_values: Tensor
    input_vectors: Tensor
    input_basis: Tensor
    output_basis: Tensor
    scale: Tensor

    def __init__(self, layer: KroneckerLayer) -> None:
        super().__init__()
        weight: Any = layer.layer.weight
        self.layer_names, self.keys = layer.names, layer.keys
        self.shape, self.has_bias = weight.shape, layer.bias is not None
        self.groups, outputs, inputs = matrix_shape(layer.layer, bias=self.has_bias)
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        factors = {"inputs": (inputs, inputs), "outputs": (outputs, outputs)}
        values = {"input_values": (inputs,), "output_values": (outputs,)}
        roots = {"input_basis": (inputs, inputs), "output_basis": (outputs, outputs), "scale": (outputs, inputs)}
        for name, shape in {**factors, **values, **roots}.items():
            dtype = self.dtype if name in roots else torch.double
            zeros = torch.zeros(self.groups, *shape, dtype=dtype, device=weight.device)
            self.register_buffer(name, zeros, persistent=name in factors)
        self.register_buffer("input_vectors", self.input_basis, persistent=False)

    def matrix(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """[groups, outputs, inputs] of tensors by name."""
        weight, *bias = (tensors[name].detach() for name in self.layer_names)
        return to_matrix(weight, bias[0] if bias else None, self.groups)

    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """Undoes `matrix`."""
        parts = from_matrix(matrix, self.shape, bias=self.has_bias)
        return {name: part for name, part in zip(self.layer_names, parts, strict=False) if part is not None}

    def by_input(self, precision: Mapping[str, Tensor]) -> Tensor:
        """The diagonal of D, [groups, inputs]. Raises ValueError if the precision differs between outputs."""
        whole = self.matrix(precision).double()
        if not bool((whole == whole[:, :1]).all()):
            raise ValueError(
                f"structure='kron' needs a prior precision that is the same for all outputs of a layer, and that of "
                f"{self.layer_names[0]} is not: give one number for each tensor, or structure='diag', 'full' or "
                "'low-rank'."
            )
        return whole[:, 0]

    def decompose_(self) -> None:
        """Find the eigenpairs of both factors."""
        self.input_values, self.input_vectors = self._eigenpairs(self.inputs)
        self.output_values, self.output_basis = self._eigenpairs(self.outputs)

    def update_(self, precision: Mapping[str, Tensor], temperature: float) -> None:
        """Find R for the `precision` of the prior by name, and the temperature."""
        prior = self.by_input(precision)
        if bool((prior == prior[:, :1]).all()):  # D^-½AD^-½ has the eigenvectors of A
            values, basis = self.input_values / prior, self.input_vectors
        else:
            root = prior.rsqrt()
            values, basis = self._eigenpairs(root.unsqueeze(2) * self.inputs * root.unsqueeze(1))
        product = (self.output_values / temperature).unsqueeze(2) * values.unsqueeze(1)
        self.input_basis = prior.rsqrt().unsqueeze(2).to(self.dtype) * basis
        self.scale = (1 + product).rsqrt().to(self.dtype)
        self.log_det_ratio = float(product.log1p().sum())

    def _eigenpairs(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(matrix)
        return values.clamp_min(0), vectors.to(self.dtype)

    def scale_(self, factor: float) -> None:
        """Multiply H by a factor."""
        self.outputs, self.output_values = self.outputs * factor, self.output_values * factor

    def correlate(self, noise: Tensor) -> Tensor:
        """R z, [groups, outputs, inputs]."""
        return self.output_basis @ (self.scale * noise) @ self.input_basis.mT

    def variance(self) -> Tensor:
        """The diagonal of R Rᵀ, in the matrix's shape."""
        return self.output_basis.square() @ self.scale.square() @ self.input_basis.square().mT

    def times_root(self, jacobian: Tensor) -> Tensor:
        """J R of J [..., groups, outputs, inputs]."""
        if self.groups > 1:
            return (self.output_basis.mT @ jacobian @ self.input_basis).mul_(self.scale)
        rotated = jacobian @ self.input_basis[0]  # of one matrix: one product for the whole batch
        return (self.output_basis[0].mT @ rotated).mul_(self.scale)

    def spectrum(self) -> Tensor:
        """Eigenvalues of A ⊗ G."""
        return (self.output_values.unsqueeze(2) * self.input_values.unsqueeze(1)).flatten()

    def feature_covariance(self, features: Tensor, *, diagonal: bool) -> Tensor:
        """V diag(Σ (UᵀD^-½φ)²/(1 + m l)) Vᵀ; arguments as in `Structure.feature_covariance`."""
        basis = self.output_basis[0].to(features)
        seen = (features @ self.input_basis[0].to(features)).square() @ self.scale[0].square().T.to(features)
        if diagonal:
            return seen @ basis.square().T
        covariance: Tensor = (basis * seen.unsqueeze(1)) @ basis.T
        return covariance


class Kronecker(Structure):
    """Factors of all layers of the table, the diagonal of H for all other parameters.

    Args:
        model: The network.
        layout: The random weights.
        last: The last layer, if they are its own.
        device: Where they are.
    """

    def __init__(self, model: nn.Module, layout: Layout, last: LastLayer | None, device: torch.device) -> None:
        super().__init__(layout, last)
        layers = kronecker_layers(model, layout.names, layout.names, aliases(model))
        covered = {name for layer in layers for name in layer.names}
        self.others = [name for name in layout.names if name not in covered]
        self._factors = nn.ModuleList(Factors(layer) for layer in layers)
        # Names only: a pass runs a copy of the network, with layers of its own.
        self.layers = [replace(layer, layer=nn.Identity()) for layer in layers]
        own = {name: torch.empty(layout.shapes[name], dtype=layout.dtypes[name]) for name in self.others}
        rest = Layout(own, least=torch.float32) if own else None
        self.rest = None if rest is None else Diagonal(rest, None, device)

    @property
    def factors(self) -> list[Factors]:
        """Those of each layer."""
        return cast(list[Factors], list(self._factors))

    def start(self) -> Sums:
        """Σ a aᵀ and Σ g gᵀ of each layer, and squared gradients."""
        sums: Sums = {}
        for one in self.factors:
            sums.update({key: torch.zeros_like(t) for key, t in zip(one.keys, (one.inputs, one.outputs), strict=True)})
        return {**sums, **({} if self.rest is None else self.rest.start())}

    def add_(self, sums: Sums, source: Source) -> None:
        """Add a batch's `source.factors()` to the sums."""
        found = source.factors(self.layers, self.others)
        for key in (key for one in self.factors for key in one.keys):
            sums[key] += found[key]
        if self.rest is not None:
            sums["curvature"] += self.rest.layout.flatten(found)

    def set_(self, sums: Sums, examples: float, data_size: float) -> None:
        """A is a mean over `examples`, and G for `data_size` of them."""
        for one in self.factors:
            one.inputs = sums[one.keys[0]] / examples
            one.outputs = sums[one.keys[1]] * (data_size / examples)
        if self.rest is not None:
            self.rest.set_(sums, examples, data_size)
        self.prepare_()

    def prepare_(self) -> None:
        """Find the eigenpairs of all factors."""
        for one in self.factors:
            one.decompose_()

    def scale_(self, factor: float) -> None:
        """Multiply H by a factor."""
        for one in self.factors:
            one.scale_(factor)
        if self.rest is not None:
            self.rest.scale_(factor)

    def check_prior(self, precision: float | Tensor) -> None:
        """Raise ValueError if the precision of the prior differs between outputs of a layer."""
        by_name = self._by_name(precision)
        for one in self.factors:
            one.by_input(by_name)

    def update_(self, precision: float | Tensor, temperature: float) -> None:
        """Find R for the `precision` of the prior and the temperature, block by block."""
        by_name = self._by_name(precision)
        for one in self.factors:
            one.update_(by_name, temperature)
        if self.rest is not None:
            own = self.rest.layout.flatten(by_name) if isinstance(precision, Tensor) else precision
            self.rest.update_(own, temperature)

    def noise(self, generator: torch.Generator) -> Tensor:
        """R z, block by block."""
        z = self.layout.split(self._standard_normal(generator), cast=False)
        found = {n: t for one in self.factors for n, t in one.split(one.correlate(one.matrix(z))).items()}
        if self.rest is not None:
            found |= self.rest.layout.split(self.rest.std * self.rest.layout.flatten(z), cast=False)
        return self.layout.flatten(found)

    def variance(self) -> Tensor:
        """Block by block."""
        found = {n: t for one in self.factors for n, t in one.split(one.variance()).items()}
        if self.rest is not None:
            found |= self.rest.layout.split(self.rest.variance(), cast=False)
        return self.layout.flatten(found)

    def log_det_ratio(self) -> float:
        """Σ log(1 + m l), and that of the diagonal."""
        rest = 0.0 if self.rest is None else self.rest.log_det_ratio()
        return rest + sum(one.log_det_ratio for one in self.factors)

    def spectra(self) -> Spectra:
        """Each layer is a block."""
        found: Spectra = {one.layer_names: one.spectrum() for one in self.factors}
        return {**found, **({} if self.rest is None else self.rest.spectra())}

    def times_root(self, jacobians: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """J R, layer by layer."""
        for one in self.factors:
            weight, *bias = (jacobians[name].to(one.dtype) for name in one.layer_names)
            batch = weight.shape[:2]
            matrix = weight.reshape(*batch, one.groups, -1, one.inputs.shape[-1] - one.has_bias)
            if bias:
                matrix = torch.cat([matrix, bias[0].reshape(*batch, one.groups, -1, 1)], -1)
            yield one.times_root(matrix).flatten(2)
        if self.rest is not None:
            yield from self.rest.times_root(jacobians)

    def feature_covariance(self, features: Tensor, outputs: int, *, diagonal: bool = False) -> Tensor:
        """That of the one layer; arguments as in `Structure.feature_covariance`."""
        return self.factors[0].feature_covariance(features, diagonal=diagonal)

    def _by_name(self, precision: float | Tensor) -> dict[str, Tensor]:
        if isinstance(precision, Tensor):
            return self.layout.split(precision, cast=False)
        number = torch.tensor(precision, dtype=torch.double, device=self.device)
        return {name: number.expand(shape) for name, shape in self.layout.shapes.items()}
