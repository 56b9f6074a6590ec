"""The KL to the prior, of traces and log determinants of the blocks' covariances: numbers only when they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from credo.core.deferred import Later
from credo.core.network.flat_layout import Layout
from credo.core.network.references import NotFollowed

if TYPE_CHECKING:
    from credo.methods.kfac.blocks import Block, Tensors


@dataclass(frozen=True)
class Parts:
    """What a block's trace and log determinant are made of.

    Attributes:
        squared: Tensors of which the sums of squares are needed.
        diagonals: Vectors of which the sums of logarithms are needed.
        sums: Sums of logarithms that are known.
    """

    squared: Sequence[Tensor]
    diagonals: Sequence[Tensor] = ()
    sums: Sequence[Tensor] = ()


class Measured(NotFollowed):
    """tr L Lᵀ and log det L Lᵀ of some blocks with these inverses.

    Args:
        inverses: The buffers of `Block.inverses` of each block.
    """

    def __init__(self, inverses: Mapping[Block, Tensors]) -> None:
        by_names = {block.names: block.parts(inverse) for block, inverse in inverses.items()}
        parts = by_names.values()
        squared = [tensor for part in parts for tensor in part.squared]
        self._norms = torch._foreach_norm(squared, dtype=torch.promote_types(squared[0].dtype, torch.float64))
        diagonals = [vector for part in parts for vector in part.diagonals]
        self._logs = torch.cat(diagonals).log() if diagonals else None
        self._counts = {n: (len(p.squared), [len(v) for v in p.diagonals], p.sums) for n, p in by_names.items()}
        self._found: dict[tuple[str, ...], tuple[list[float], list[float]]] | None = None

    def of(self, block: Block) -> tuple[float, float]:
        """Trace and log determinant of a block."""
        self._found = self._found or self._read()
        return block.trace_and_log_determinant(*self._found[block.names])

    def _read(self) -> dict[tuple[str, ...], tuple[list[float], list[float]]]:
        squares = iter([norm * norm for norm in torch.stack(list(self._norms)).tolist()])
        logs = iter([] if self._logs is None else self._logs.tolist())
        found = {}
        for names, (count, lengths, sums) in self._counts.items():
            own = [next(squares) for _ in range(count)]
            total = [math.fsum(next(logs) for _ in range(length)) for length in lengths]
            found[names] = own, total + [float(each) for each in sums]
        return found


def kl_to_prior(
    blocks: Mapping[Block, tuple[Tensors, Measured]],
    offsets: Mapping[str, Tensor],
    precision: float | Tensor,
    scale: float,
    layout: Layout,
) -> Later:
    """KL(q ‖ p) in nats, q with covariance scale · L Lᵀ.

    Args:
        blocks: The random blocks with their inverses, and what was measured of these.
        offsets: Means from the prior's, by name.
        precision: The prior's.
        scale: τ/N.
        layout: The random parameters.
    """
    if isinstance(precision, Tensor):
        each = {n: v for b, (now, _) in blocks.items() for n, v in b.split(b.variance(now)).items()}
        whole = layout.flatten(offsets)
        quadratic = (precision * (scale * layout.flatten(each) + whole.square())).double().sum()
        logs = precision.double().log().sum()
    else:
        norms = torch._foreach_norm([*offsets.values()])
    found = {block: measured for block, (_, measured) in blocks.items()}  # not the inverses, which may be large

    def read() -> float:
        trace, log_determinant = (math.fsum(n) for n in zip(*(m.of(b) for b, m in found.items()), strict=True))
        if isinstance(precision, Tensor):
            squares, log_precision = quadratic.item(), logs.item()
        else:
            squares = precision * (scale * trace + sum(norm * norm for norm in torch.stack(norms).tolist()))
            log_precision = layout.size * math.log(precision)
        return 0.5 * (squares - log_precision - layout.size * (1 + math.log(scale)) - log_determinant)

    return Later(read)
