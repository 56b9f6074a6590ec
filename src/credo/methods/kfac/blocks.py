"""The state of K-FAC, block by block: curvature, its inverse and the momentum of parameters that belong together.

Parameters of different blocks are independent; each block has its parameters as one tensor, here called its matrix.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.kernels import flat
from credo.core.kronecker.factors import (
    LARGE_INVERSE,
    diagonal,
    factored_dampings,
    from_matrix,
    inverse_roots,
    matrix_shape,
    own_product,
    product,
    root_product,
    to_matrix,
)
from credo.core.kronecker.hooks import CurvaturePlan
from credo.core.kronecker.layer_rules import KroneckerLayer, kronecker_layers
from credo.core.network.substitute import parameters_at
from credo.methods.kfac.measured import Measured, Parts

Tensors = tuple[Tensor, ...]


class Block(nn.Module, ABC):
    """Some parameters, their curvature C, and L with L Lᵀ = (C + damping)⁻¹; L is zero before the first step.

    `averages` and `inverses` name the buffers of the curvature and of what is made from it.

    Args:
        names: Names of the parameters.
        keys: Keys of the block's curvature among gathered ones.
        is_random: Whether the parameters have noise and prior.
    """

    averages: ClassVar[tuple[str, ...]]
    inverses: ClassVar[tuple[str, ...]]
    momentum: Tensor
    measured: Measured
    """Of the present inverse."""

    def __init__(self, names: tuple[str, ...], keys: tuple[str, ...], is_random: bool) -> None:
        super().__init__()
        self.names, self.keys, self.is_random = names, keys, is_random
        self.register_load_state_dict_post_hook(_remade)  # type: ignore[no-untyped-call]

    @abstractmethod
    def matrix(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensors by parameter name as one."""

    @abstractmethod
    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """Undoes `matrix`."""

    @staticmethod
    @abstractmethod
    def inverted(
        blocks: Sequence[Any], curvatures: Sequence[Tensors], dampings: Sequence[float | Tensor]
    ) -> list[Tensors]:
        """What a new inverse takes much work for, of some blocks of this kind; see `completed`.

        Args:
            blocks: The blocks.
            curvatures: The curvature of each.
            dampings: For each, one number, or a tensor of its matrix's shape.
        """

    def completed(self, made: Tensors | None, curvature: Tensors | None, damping: float | Tensor) -> Tensors | None:
        """The buffers of `inverses`; None if they stay as they are.

        Args:
            made: What `inverted` has made; None if no new inverse is due.
            curvature: The curvature, if it is new.
            damping: As for `inverted`.
        """
        return made

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
    def parts(self, inverse: Tensors) -> Parts:
        """What trace and log determinant of L Lᵀ are made of."""

    @abstractmethod
    def trace_and_log_determinant(self, squares: Sequence[float], logs: Sequence[float]) -> tuple[float, float]:
        """Both, from the sums of squares and of logarithms that `parts` asks for."""

    def current(self, names: tuple[str, ...]) -> Tensors:
        """These buffers."""
        return tuple(getattr(self, name) for name in names)

    def noise(self, generator: torch.Generator) -> Tensor:
        """Gaussian noise with covariance L Lᵀ."""
        like = self.momentum
        standard = flat.normal(like.numel(), generator, device=like.device, dtype=like.dtype)
        return self.correlate(standard.view(like.shape))

    def remake(self) -> None:
        """Make the buffers that are not saved."""
        self.measured = Measured({self: self.current(self.inverses)})


def _remade(block: nn.Module, _: Any) -> None:
    assert isinstance(block, Block)
    block.remake()


class LayerBlock(Block):
    """A layer's weight and bias as one matrix, and averages of A and G.

    Args:
        layer: The layer.
        is_random: Whether its parameters have noise and prior.
    """

    nonnegative_diagonals: ClassVar[tuple[str, ...]] = ("inputs", "outputs")
    inputs: Tensor
    outputs: Tensor

    def __init__(self, layer: KroneckerLayer, is_random: bool) -> None:
        super().__init__(layer.names, layer.keys, is_random)
        weight: Any = layer.layer.weight
        self.groups, outputs, inputs = matrix_shape(layer.layer, bias=layer.bias is not None)
        self.shape, self.has_bias = weight.shape, layer.bias is not None
        self._register("momentum", weight, outputs, inputs)
        for kind, size in (("input", inputs), ("output", outputs)):
            self._register(f"{kind}s", weight, size, size)
            self._register_inverse(kind, weight, size)
        self._register_whole(weight)

    @abstractmethod
    def _register_inverse(self, kind: str, weight: Tensor, size: int) -> None:
        """Make the buffers of one side, `kind`."""

    def _register_whole(self, weight: Tensor) -> None:
        """Make the buffers of both sides."""

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


class KroneckerBlock(LayerBlock):
    """A layer's weight and bias: C = A ⊗ G, with factored damping (Martens and Grosse 2015).

    Args:
        layer: The layer.
        is_random: Whether its parameters have noise and prior.
    """

    averages = ("inputs", "outputs")
    nonnegative_diagonals = ("inputs", "outputs", "input_root", "output_root")
    inverses = ("input_root", "output_root", "input_inverse", "output_inverse")
    input_root: Tensor
    output_root: Tensor
    input_inverse: Tensor
    output_inverse: Tensor

    def _register_inverse(self, kind: str, weight: Tensor, size: int) -> None:
        self._register(f"{kind}_root", weight, size, size)
        self._register(f"{kind}_inverse", weight, size, size, persistent=False)

    @staticmethod
    def inverted(
        blocks: Sequence[Any], curvatures: Sequence[Tensors], dampings: Sequence[float | Tensor]
    ) -> list[Tensors]:
        """A damping that differs within a group enters by its mean there.

        Args:
            blocks: The blocks.
            curvatures: A and G of each.
            dampings: The damping of each.
        """
        by_group = [d.mean((-2, -1)) if isinstance(d, Tensor) else d for d in dampings]
        inputs, outputs = ([curvature[side] for curvature in curvatures] for side in (0, 1))
        shares = factored_dampings(inputs, outputs, by_group)
        roots = inverse_roots([*inputs, *outputs], [*shares[0], *shares[1]])
        pairs = zip(roots[: len(blocks)], roots[len(blocks) :], strict=True)
        return [(*pair, *(own_product(root) for root in pair)) for pair in pairs]

    def precondition(self, matrix: Tensor, inverse: Tensors) -> Tensor:
        """G⁻¹ · matrix · A⁻¹."""
        return product(inverse[3], matrix, inverse[2])

    def correlate(self, noise: Tensor) -> Tensor:
        """L_G · noise · L_Aᵀ."""
        return root_product(self.output_root, noise, self.input_root)

    def variance(self, inverse: Tensors) -> Tensor:
        """diag(G⁻¹) ⊗ diag(A⁻¹)."""
        return diagonal(inverse[3]).unsqueeze(-1) * diagonal(inverse[2]).unsqueeze(-2)

    def parts(self, inverse: Tensors) -> Parts:
        """Both roots (of large ones, the inverse's diagonal) or, of several groups, one number; and their diagonals."""
        logs = [diagonal(root).reshape(-1) for root in inverse[:2]]
        if self.groups == 1:
            pairs = zip(inverse[:2], inverse[2:], strict=True)
            return Parts([r if len(r[0]) < LARGE_INVERSE else diagonal(whole).sqrt() for r, whole in pairs], logs)
        traces = [diagonal(whole).sum(-1, dtype=torch.float64) for whole in inverse[2:]]
        return Parts([traces[0].dot(traces[1]).sqrt()], logs)

    def trace_and_log_determinant(self, squares: Sequence[float], logs: Sequence[float]) -> tuple[float, float]:
        """tr G⁻¹ · tr A⁻¹ and inputs · log det G⁻¹ + outputs · log det A⁻¹, summed over groups."""
        _, outputs, inputs = self.momentum.shape
        return math.prod(squares), 2 * (outputs * logs[0] + inputs * logs[1])

    def remake(self) -> None:
        """Inverses are not saved: their roots are."""
        self.input_inverse.copy_(own_product(self.input_root))
        self.output_inverse.copy_(own_product(self.output_root))
        super().remake()


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

    @staticmethod
    def inverted(
        blocks: Sequence[Any], curvatures: Sequence[Tensors], dampings: Sequence[float | Tensor]
    ) -> list[Tensors]:
        """1/√(curvature + damping).

        Args:
            blocks: The blocks.
            curvatures: The curvature of each.
            dampings: The damping of each.
        """
        return [((c + d).clamp_min(1e-12).rsqrt(),) for (c,), d in zip(curvatures, dampings, strict=True)]

    def precondition(self, matrix: Tensor, inverse: Tensors) -> Tensor:
        """matrix / (curvature + damping)."""
        return matrix * inverse[0].square()

    def correlate(self, noise: Tensor) -> Tensor:
        """noise / √(curvature + damping)."""
        return noise * self.root

    def variance(self, inverse: Tensors) -> Tensor:
        """1/(curvature + damping)."""
        return inverse[0].square()

    def parts(self, inverse: Tensors) -> Parts:
        """1/√(curvature + damping)."""
        return Parts(inverse, sums=[inverse[0].log().sum(dtype=torch.float64)])

    def trace_and_log_determinant(self, squares: Sequence[float], logs: Sequence[float]) -> tuple[float, float]:
        """Σ 1/(curvature + damping) and −Σ log(curvature + damping)."""
        return squares[0], 2 * logs[0]


def inverted(
    blocks: Sequence[Block], curvatures: Sequence[Tensors], dampings: Sequence[float | Tensor]
) -> dict[Block, Tensors]:
    """`Block.inverted` of blocks; those of a kind together.

    Args:
        blocks: The blocks.
        curvatures: The curvature of each.
        dampings: The damping of each.
    """
    found: dict[Block, Tensors] = {}
    kinds: list[type[Block]] = list(dict.fromkeys(type(block) for block in blocks))
    for kind in kinds:
        listed = [given for given in zip(blocks, curvatures, dampings, strict=True) if type(given[0]) is kind]
        own, *rest = zip(*listed, strict=True)
        found.update(zip(own, kind.inverted(own, *rest), strict=True))
    return found


def make_blocks(
    model: nn.Module,
    names: Sequence[str],
    random: Sequence[str],
    aliases: Mapping[str, tuple[str, ...]],
    diagonal: Sequence[str],
    kind: type[LayerBlock] = KroneckerBlock,
) -> tuple[CurvaturePlan, list[Block]]:
    """The plan that estimates curvatures, and the blocks: one of each layer with factors, diagonal ones of the rest.

    Args:
        model: The network.
        names: The trainable parameters.
        random: Those of them that are random.
        aliases: All names of each parameter.
        diagonal: Names or globs of parameters that get no factors.
        kind: Blocks of layers with factors.
    """
    layers = kronecker_layers(model, names, random, aliases, diagonal)
    covered = {name for layer in layers for name in layer.names}
    others = parameters_at(model, [name for name in names if name not in covered])
    blocks: list[Block] = [kind(layer, layer.weight in random) for layer in layers]
    blocks += [DiagonalBlock(name, parameter, name in random) for name, parameter in others.items()]
    return CurvaturePlan(model, layers, [*others], aliases), blocks
