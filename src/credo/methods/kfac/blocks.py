"""The state of K-FAC, block by block: curvature, its inverse and the momentum of parameters that belong together.

Parameters of different blocks are independent; each block has its parameters as one tensor, here called its matrix.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.kernels import flat
from credo.core.kronecker.factors import (
    factored_damping,
    from_matrix,
    inverse_diagonal,
    inverse_root,
    log_determinant,
    matrix_shape,
    own_product,
    product,
    root_product,
    to_matrix,
)
from credo.core.kronecker.hooks import CurvaturePlan
from credo.core.kronecker.layer_rules import KroneckerLayer, kronecker_layers
from credo.core.network.substitute import parameters_at

Tensors = tuple[Tensor, ...]

# Rows of a factor up to which new ones cost little.
_SMALL = 256


@dataclass(frozen=True)
class Change:
    """What an update does to a block, complete before anything is written; None: unchanged."""

    curvature: Tensors | None
    inverse: Tensors | None
    momentum: Tensor
    step: Tensor


class Block(nn.Module, ABC):
    """Some parameters, their curvature C, and L with L Lᵀ = (C + damping)⁻¹; L is zero before the first step.

    `averages` and `inverses` name the buffers of the curvature and of what is made from it.

    Args:
        names: Names of the parameters.
        keys: Keys of the block's curvature among gathered ones.
        is_random: Whether the parameters have noise and prior.
    """

    averages: tuple[str, ...]
    inverses: tuple[str, ...]
    momentum: Tensor

    def __init__(self, names: tuple[str, ...], keys: tuple[str, ...], is_random: bool) -> None:
        super().__init__()
        self.names, self.keys, self.is_random = names, keys, is_random

    @abstractmethod
    def matrix(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensors by parameter name as one."""

    @abstractmethod
    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """Undoes `matrix`."""

    @abstractmethod
    def invert(self, curvature: Tensors, damping: float | Tensor) -> Tensors:
        """The buffers of `inverses`; the damping is one number or has the matrix's shape."""

    @abstractmethod
    def precondition(self, matrix: Tensor, inverse: Tensors) -> Tensor:
        """(C + damping)⁻¹ · matrix."""

    @abstractmethod
    def correlate(self, noise: Tensor) -> Tensor:
        """L · noise."""

    @abstractmethod
    def variance(self, inverse: Tensors) -> Tensor:
        """The diagonal of L Lᵀ, in the matrix's shape."""

    @abstractmethod
    def total_variance(self, inverse: Tensors) -> float:
        """The trace of L Lᵀ."""

    @abstractmethod
    def log_determinant(self, inverse: Tensors) -> float:
        """log det L Lᵀ."""

    def average(self, found: Mapping[str, Tensor], keep: float, scale: float) -> Tensors:
        """The curvature with new estimates averaged in.

        Args:
            found: Gathered curvatures.
            keep: Weight of the old curvature.
            scale: Factor of the new ones.
        """
        now = (getattr(self, name) for name in self.averages)
        new = (1 - keep) * scale
        return tuple(torch.mul(c, keep).add_(found[key], alpha=new) for c, key in zip(now, self.keys, strict=True))

    def is_found(self, found: Mapping[str, Tensor]) -> bool:
        """Whether the block's curvature is among gathered ones."""
        return self.keys[0] in found

    def current(self, names: tuple[str, ...]) -> Tensors:
        """These buffers."""
        return tuple(getattr(self, name) for name in names)

    def noise(self, generator: torch.Generator) -> Tensor:
        """Gaussian noise with covariance L Lᵀ."""
        like = self.momentum
        standard = flat.normal(like.numel(), generator, device=like.device, dtype=like.dtype)
        return self.correlate(standard.view(like.shape))

    def kl(self, offset: Tensor, precision: float | Tensor, scale: float, inverse: Tensors) -> float:
        """KL of N(·, scale·L Lᵀ) to a prior of independent entries.

        Args:
            offset: Means less those of the prior.
            precision: Precision of the prior.
            scale: Factor of the covariance.
            inverse: The buffers of `inverses`.
        """
        size = offset.numel()
        spread = size * (1 + math.log(scale)) + self.log_determinant(inverse)
        if not isinstance(precision, Tensor):
            squares = scale * self.total_variance(inverse) + float(offset.square().sum(dtype=torch.float64))
            return 0.5 * (precision * squares - size * math.log(precision) - spread)
        quadratic = (precision * (scale * self.variance(inverse) + offset.square())).double().sum()
        return 0.5 * (float(quadratic - precision.double().log().expand(offset.shape).sum()) - spread)

    def take_(self, change: Change) -> None:
        """Write a change into the block's buffers; the parameters are the caller's."""
        for names, tensors in ((self.averages, change.curvature), (self.inverses, change.inverse)):
            for name, tensor in zip(names, tensors or (), strict=False):
                getattr(self, name).copy_(tensor)
        self.momentum.copy_(change.momentum)


class KroneckerBlock(Block):
    """A layer's weight and bias: C = A ⊗ G, with factored damping (Martens and Grosse 2015).

    Args:
        layer: The layer.
        is_random: Whether its parameters have noise and prior.

    Attributes:
        is_costly: Whether its factors cost much beside a pass: those of convolutions and of wide layers.
    """

    averages = ("inputs", "outputs")
    nonnegative_diagonals = ("inputs", "outputs", "input_root", "output_root")
    inverses = ("input_root", "output_root", "input_inverse", "output_inverse")
    inputs: Tensor
    outputs: Tensor
    input_root: Tensor
    output_root: Tensor
    input_inverse: Tensor
    output_inverse: Tensor

    def __init__(self, layer: KroneckerLayer, is_random: bool) -> None:
        super().__init__(layer.names, layer.keys, is_random)
        weight: Any = layer.layer.weight
        self.groups, outputs, inputs = matrix_shape(layer.layer, bias=layer.bias is not None)
        self.shape, self.has_bias = weight.shape, layer.bias is not None
        self.is_costly = weight.dim() > 2 or max(inputs, outputs) > _SMALL
        self._register("momentum", weight, outputs, inputs)
        for kind, size in (("input", inputs), ("output", outputs)):
            self._register(f"{kind}s", weight, size, size)
            self._register(f"{kind}_root", weight, size, size)
            self._register(f"{kind}_inverse", weight, size, size, persistent=False)
        self.register_load_state_dict_post_hook(_multiply_roots)  # type: ignore[no-untyped-call]

    def _register(self, name: str, like: Tensor, rows: int, columns: int, *, persistent: bool = True) -> None:
        dtype = torch.promote_types(like.dtype, torch.float32)
        zeros = torch.zeros(self.groups, rows, columns, dtype=dtype, device=like.device)
        self.register_buffer(name, zeros, persistent=persistent)

    def matrix(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """[groups, outputs, inputs], the bias as the last column."""
        weight, *bias = (tensors[name].detach().to(self.momentum) for name in self.names)
        return to_matrix(weight, bias[0] if bias else None, self.groups)

    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """Weight and bias."""
        parts = from_matrix(matrix, self.shape, bias=self.has_bias)
        return {name: part for name, part in zip(self.names, parts, strict=False) if part is not None}

    def invert(self, curvature: Tensors, damping: float | Tensor) -> Tensors:
        """A damping that differs within a group enters by its mean there."""
        if isinstance(damping, Tensor):
            damping = damping.mean((-2, -1))
        dampings = factored_damping(curvature[0], curvature[1], damping)
        roots = [inverse_root(c, d) for c, d in zip(curvature, dampings, strict=True)]
        return (*roots, *(own_product(root) for root in roots))

    def precondition(self, matrix: Tensor, inverse: Tensors) -> Tensor:
        """G⁻¹ · matrix · A⁻¹."""
        return product(inverse[3], matrix, inverse[2])

    def correlate(self, noise: Tensor) -> Tensor:
        """L_G · noise · L_Aᵀ."""
        return root_product(self.output_root, noise, self.input_root)

    def variance(self, inverse: Tensors) -> Tensor:
        """diag(G⁻¹) ⊗ diag(A⁻¹)."""
        return inverse_diagonal(inverse[1]).unsqueeze(-1) * inverse_diagonal(inverse[0]).unsqueeze(-2)

    def total_variance(self, inverse: Tensors) -> float:
        """The trace of G⁻¹ times that of A⁻¹, summed over groups."""
        traces = [each.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64) for each in inverse[2:]]
        return float((traces[0] * traces[1]).sum())

    def log_determinant(self, inverse: Tensors) -> float:
        """inputs · log det G⁻¹ + outputs · log det A⁻¹, summed over groups."""
        _, outputs, inputs = self.momentum.shape
        by_group = inputs * log_determinant(inverse[1]) + outputs * log_determinant(inverse[0])
        return float(by_group.double().sum())


def _multiply_roots(block: nn.Module, _: Any) -> None:
    """Inverses are not saved: their roots are."""
    assert isinstance(block, KroneckerBlock)
    block.input_inverse.copy_(own_product(block.input_root))
    block.output_inverse.copy_(own_product(block.output_root))


class DiagonalBlock(Block):
    """One parameter whose entries are independent; its curvature is the mean of squared per-example gradients.

    Args:
        name: Name of the parameter.
        parameter: The parameter.
        is_random: Whether it has noise and prior.
    """

    averages = ("curvature",)
    nonnegative = ("curvature", "root")
    inverses = ("root",)
    curvature: Tensor
    root: Tensor

    def __init__(self, name: str, parameter: Tensor, is_random: bool) -> None:
        super().__init__((name,), (name,), is_random)
        for buffer in ("momentum", "curvature", "root"):
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            self.register_buffer(buffer, torch.zeros_like(parameter, dtype=dtype, requires_grad=False))

    def matrix(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tensor itself."""
        return tensors[self.names[0]].detach().to(self.momentum)

    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """By name."""
        return {self.names[0]: matrix}

    def invert(self, curvature: Tensors, damping: float | Tensor) -> Tensors:
        """1/√(curvature + damping)."""
        return ((curvature[0] + damping).clamp_min(1e-12).rsqrt(),)

    def precondition(self, matrix: Tensor, inverse: Tensors) -> Tensor:
        """matrix / (curvature + damping)."""
        return matrix * inverse[0].square()

    def correlate(self, noise: Tensor) -> Tensor:
        """noise / √(curvature + damping)."""
        return noise * self.root

    def variance(self, inverse: Tensors) -> Tensor:
        """1/(curvature + damping)."""
        return inverse[0].square()

    def total_variance(self, inverse: Tensors) -> float:
        """Σ 1/(curvature + damping)."""
        return float(inverse[0].square().sum(dtype=torch.float64))

    def log_determinant(self, inverse: Tensors) -> float:
        """−Σ log(curvature + damping)."""
        return float(2 * inverse[0].double().log().sum())


def make_blocks(
    model: nn.Module,
    names: Sequence[str],
    random: Sequence[str],
    aliases: Mapping[str, tuple[str, ...]],
    diagonal: Sequence[str],
) -> tuple[CurvaturePlan, list[Block]]:
    """The plan that estimates curvatures, and the blocks: Kronecker ones of layers, diagonal ones of the rest.

    Args:
        model: The network.
        names: The trainable parameters.
        random: Those of them that are random.
        aliases: All names of each parameter.
        diagonal: Names or globs of parameters that get no factors.
    """
    layers = kronecker_layers(model, names, random, aliases, diagonal)
    covered = {name for layer in layers for name in layer.names}
    others = parameters_at(model, [name for name in names if name not in covered])
    blocks: list[Block] = [KroneckerBlock(layer, layer.weight in random) for layer in layers]
    blocks += [DiagonalBlock(name, parameter, name in random) for name, parameter in others.items()]
    return CurvaturePlan(model, layers, [*others], aliases), blocks
