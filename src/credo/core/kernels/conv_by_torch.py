"""Per-example weight gradients of convolutions as matrix products, over small chunks of examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

# Entries of all temporaries of one chunk of examples: at most these (one example may have more), or twice as many where
# that is all the examples (`_chunks`).
_CHUNK = 1 << 20
# From this many weights on, process blocks of them that fit in a core's L2 cache.
_MANY, _BLOCK = 1 << 17, 1 << 16
# Entries of input patches held at once.
_PATCHES = 1 << 24
# Up to this many positions, sums of squares over pairs of positions (one matrix product each) are cheaper.
_FEW = 4


@dataclass(frozen=True)
class ConvShape:
    """Hyper-parameters of a convolution, one entry per spatial dimension; zero padding on both sides."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def sums(x: Tensor, g: Tensor, shape: ConvShape) -> tuple[Tensor, Tensor]:
    """Σ g and Σ g² over examples, g being one example's weight gradient.

    Args:
        x: Input of the convolution, [batch, channels, …].
        g: Gradient at its output, [batch, outputs, …].
        shape: Kernel, stride, padding, dilation and groups.
    """
    size = torch.Size([2, shape.groups, g.shape[1] // shape.groups, x.shape[1] // shape.groups * prod(shape.kernel)])
    if g.numel() > 0 and prod(g.shape[2:]) > _FEW and size[1:].numel() < _MANY:
        both = _chunk_sums(size, x, g, shape)
    else:
        both = g.new_zeros(size)
        if g.numel() > 0 and prod(g.shape[2:]) <= _FEW:
            rows, patches = _rows(g, shape), _patches(x, g, shape)
            _add_products(both[0], rows, patches)
            _add_pair_squares(both[1], rows, patches)
        elif g.numel() > 0:
            _add_blocks(both[0], both[1], x, g, shape)
    total, squares = _weight_order(both, x, g, shape)
    return total, squares


def per_example(x: Tensor, g: Tensor, shape: ConvShape) -> Tensor:
    """Per-example weight gradients [batch, outputs, channels / groups, *kernel]; `x`, `g`, `shape` as in `sums`."""
    each = torch.matmul(_rows(g, shape), _patches(x, g, shape))
    return _weight_order(each, x, g, shape)


def linear_squares(x: Tensor, g: Tensor) -> Tensor:
    """Σ g² for a linear layer shared by all positions: `x` [batch, positions, in], `g` [batch, positions, out]."""
    squares = g.new_zeros(1, g.shape[-1], x.shape[-1])
    rows, patches = g.transpose(1, 2).unsqueeze(1), x.unsqueeze(1)
    if 0 < g.shape[1] <= _FEW:
        _add_pair_squares(squares, rows, patches)
    elif g.numel() > 0:
        for part in _chunks(rows.shape[0], rows.shape[2:].numel() + patches.shape[2:].numel() + squares.numel()):
            squares += torch.matmul(rows[part], patches[part]).square_().sum(0)
    return squares[0]


# -- as matrix products: rows [batch, groups, outputs, positions] × patches [batch, groups, positions, …] -----------


def _rows(g: Tensor, shape: ConvShape) -> Tensor:
    return g.reshape(g.shape[0], shape.groups, g.shape[1] // shape.groups, -1)


def _channels_first(x: Tensor, g: Tensor, shape: ConvShape) -> bool:
    """Whether patches are copied in longer runs along positions than along kernel columns and channels."""
    run = x.shape[1] // shape.groups * (shape.kernel[-1] if shape.dilation[-1] == 1 else 1)
    return shape.stride[-1] == 1 and run < g.shape[-1]


def _patches(x: Tensor, g: Tensor, shape: ConvShape) -> Tensor:
    """Input patch of each position."""
    first = _channels_first(x, g, shape)
    padded = _padded(x, g, shape, first)
    batch, groups, *inner = padded.stride()
    channel, spatial = (inner[0], inner[1:]) if first else (inner[-1], inner[:-1])
    channels = padded.shape[2 if first else -1]
    steps = [s * step for s, step in zip(spatial, shape.stride, strict=True)]
    taps = [s * step for s, step in zip(spatial, shape.dilation, strict=True)]
    ends = list(padded.shape[:2])
    if first:
        view = padded.as_strided(
            [*ends, channels, *shape.kernel, *g.shape[2:]], [batch, groups, channel, *taps, *steps]
        )
        return view.reshape(*ends, channels * prod(shape.kernel), -1).transpose(-1, -2)
    view = padded.as_strided([*ends, *g.shape[2:], *shape.kernel, channels], [batch, groups, *steps, *taps, channel])
    return view.reshape(*ends, -1, prod(shape.kernel) * channels)


def _padded(x: Tensor, g: Tensor, shape: ConvShape, channels_first: bool) -> Tensor:
    """Padded input [batch, groups, channels, …] or [batch, groups, …, channels], cropped to what is read."""
    sizes = [
        (out - 1) * stride + dilation * (kernel - 1) + 1
        for out, stride, dilation, kernel in zip(g.shape[2:], shape.stride, shape.dilation, shape.kernel, strict=True)
    ]
    inputs: Tensor = x.unflatten(1, (shape.groups, -1))
    channels = inputs.shape[2]
    inputs = inputs if channels_first else inputs.movedim(2, -1)
    inner = [channels, *sizes] if channels_first else [*sizes, channels]
    if not any(shape.padding):
        for dim, size in enumerate(sizes, start=3 if channels_first else 2):
            inputs = inputs.narrow(dim, 0, size)
        return inputs if channels_first else inputs.contiguous()
    padded: Tensor = x.new_zeros(x.shape[0], shape.groups, *inner)
    inside, source = padded, inputs
    start = 3 if channels_first else 2
    for dim, (size, pad, have) in enumerate(zip(sizes, shape.padding, x.shape[2:], strict=True), start=start):
        count = max(0, min(have, size - pad))
        inside, source = inside.narrow(dim, min(pad, size), count), source.narrow(dim, 0, count)
    inside.copy_(source)
    return padded


def _weight_order(sums: Tensor, x: Tensor, g: Tensor, shape: ConvShape) -> Tensor:
    """From […, groups, outputs / groups, entries of a patch] to the weight's own […, outputs, channels, *kernel]."""
    rows, first = sums.flatten(-3, -2), _channels_first(x, g, shape)
    weight: Tensor = rows.unflatten(-1, (-1, *shape.kernel) if first else (*shape.kernel, -1))
    if first:
        return weight
    return weight.movedim(-1, weight.dim() - 1 - len(shape.kernel)).contiguous()


# -- sums over examples -------------------------------------------------------------------------------------------


def _chunk_sums(size: torch.Size, x: Tensor, g: Tensor, shape: ConvShape) -> Tensor:
    """Σ g and Σ g², [2, groups, outputs / groups, entries of a patch]."""
    rows, both = _rows(g, shape), g.new_empty(size)
    total, squares = both.view(2, -1)
    _, groups, outputs, length = size
    positions = rows.shape[-1]
    workspace: Tensor | None = None
    for part in _chunks(x.shape[0], groups * (outputs * (positions + length) + positions * length)):
        patches = _patches(x[part], g[part], shape).flatten(0, 1)
        count = part.stop - part.start
        if workspace is None:  # allocating for each chunk would cost more than the arithmetic
            workspace = g.new_empty(count * groups, outputs, length)
        each = workspace[: count * groups]
        torch.bmm(rows[part].flatten(0, 1), patches, out=each)
        flat = each.view(count, -1)
        if part.start == 0:
            torch.sum(flat, 0, out=total)
            torch.sum(flat.square_(), 0, out=squares)
        else:
            total += flat.sum(0)
            squares += flat.square_().sum(0)
    return both


def _add_blocks(total: Tensor, squares: Tensor, x: Tensor, g: Tensor, shape: ConvShape) -> None:
    """For many weights: Σ g as one product, Σ g² example by example over blocks of outputs."""
    groups, outputs, length = total.shape
    rows = _rows(g, shape)
    step = max(1, min(outputs, _BLOCK // length))
    workspace = g.new_empty(step, length)
    for part in _chunks(x.shape[0], groups * rows.shape[-1] * length, _PATCHES):
        patches = _patches(x[part], g[part], shape)
        _add_products(total, rows[part], patches)
        for group in range(groups):
            for start in range(0, outputs, step):
                block = slice(start, min(outputs, start + step))
                each = workspace[: block.stop - block.start]
                for left, right in zip(rows[part, group, block], patches[:, group], strict=True):
                    torch.mm(left, right, out=each)
                    squares[group, block].addcmul_(each, each)


def _add_products(total: Tensor, rows: Tensor, patches: Tensor) -> None:
    groups, outputs, length = total.shape
    left = rows.permute(1, 2, 0, 3).reshape(groups, outputs, -1)
    total.baddbmm_(left, patches.transpose(0, 1).reshape(groups, -1, length))


def _add_pair_squares(squares: Tensor, rows: Tensor, patches: Tensor) -> None:
    """(Σ_l a_l)² = Σ_l a_l² + 2 Σ_{l<m} a_l a_m: each term is one matrix product over the examples."""
    left, right = rows.permute(3, 1, 2, 0), patches.permute(2, 1, 0, 3)
    for first in range(left.shape[0]):
        for second in range(first, left.shape[0]):
            alpha = 1 if first == second else 2
            squares.baddbmm_(left[first] * left[second], right[first] * right[second], alpha=alpha)


def _chunks(count: int, entries: int, most: int | None = None) -> Iterator[slice]:
    """Slices over `count` examples of `entries` entries each; a slice has one example or at most `most` entries.

    Without `most`, at most `_CHUNK`, or a single slice of at most twice as many examples as fit into it.
    """
    step = max(1, (most or _CHUNK) // max(1, entries))
    if most is None and step < count <= 2 * step:  # small anyhow: two halves would be twice as many operators
        step = count
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))
