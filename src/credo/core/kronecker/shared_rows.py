"""Second moments of a convolution's patches from the rows of its input that several patches share.

The patches of a kernel of k rows are k rows of the padded image, unfolded in all directions but the first. With stride
1 in that direction, rows h and h + δ of the image meet in the block of kernel rows r and r + δ of every r, but for h
near the edges. So k products of unfolded rows give what the patches give by k², from a copy that is k times smaller.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

# Products from which on fewer of them save more time than calls cost.
LARGE_WORK = 1 << 28


def rows_are_shared(layer: nn.Module, x: Tensor, *, positions: int, size: int) -> bool:
    """Whether `shared_row_moments` is possible and cheaper.

    Args:
        layer: A convolution.
        x: Its input.
        positions: Output positions of an example.
        size: Entries of a patch.
    """
    conv: Any = layer
    kernel, reach = conv.kernel_size[0], (conv.kernel_size[0] - 1) * conv.dilation[0]
    height = x.shape[2] + sum(conv._reversed_padding_repeated_twice[-2:]) - reach
    is_large = len(x) * positions * size**2 * conv.groups >= LARGE_WORK
    return bool(kernel > 1 and conv.stride[0] == 1 and height > reach and is_large)


def shared_row_moments(layer: nn.Module, x: Tensor, *, bias: bool, weights: Tensor | None = None) -> Tensor:
    """Σ w·a aᵀ over the patches a of all examples and positions, [groups, size, size].

    In the order of `factors.patches`: channels last, a 1 for the bias behind them.

    Args:
        layer: The convolution, of stride 1 in the first direction.
        x: Its input.
        bias: Whether the bias is part of the matrix.
        weights: Weights w of the examples; None: 1.
    """
    conv: Any = layer
    kernel, step = conv.kernel_size[0], conv.dilation[0]
    rows, positions = _unfolded_rows(conv, x)  # [groups, rows, examples · positions in a row, entries]
    left, total = rows, float(len(x) * positions)
    if weights is not None:
        weights = weights.to(rows)
        left = rows * weights.repeat_interleave(positions).unsqueeze(1)
        total = float(weights.sum()) * positions
    groups, count, _, entries = rows.shape
    height, size = count - (kernel - 1) * step, kernel * entries
    blocks = rows.new_empty(groups, size + bias, size + bias)
    inner = blocks[:, :size, :size].unflatten(1, (kernel, entries)).unflatten(3, (kernel, entries))
    for shift in range(kernel):
        for first, block in enumerate(_windows(left, rows, shift * step, kernel - shift, step, height)):
            inner[:, first, :, first + shift] = block
            inner[:, first + shift, :, first] = block.mT
    if bias:
        sums = left.sum(2)
        blocks[:, :size, size] = sums.unfold(1, height, 1).sum(-1)[:, ::step].flatten(1)
        blocks[:, size, :size] = blocks[:, :size, size]
        blocks[:, size, size] = total * height
    return blocks


def _windows(left: Tensor, right: Tensor, shift: int, count: int, step: int, height: int) -> list[Tensor]:
    """Σ over `height` rows h, from 0, `step`, … (`count` of them) on, of left[h]ᵀ right[h + shift]."""
    edge = (count - 1) * step
    core = left[:, edge:height].flatten(1, 2).mT @ right[:, edge + shift : height + shift].flatten(1, 2)
    if count == 1:
        return [core]
    before = left[:, :edge].mT @ right[:, shift : edge + shift]
    after = left[:, height : height + edge].mT @ right[:, height + shift : height + edge + shift]
    firsts = [index * step for index in range(count)]
    return [core + before[:, first:].sum(1) + after[:, :first].sum(1) for first in firsts]


def _unfolded_rows(conv: Any, x: Tensor) -> tuple[Tensor, int]:
    """The padded image, unfolded in all directions but the first, and positions in a row."""
    if any(conv._reversed_padding_repeated_twice):
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
    x = x.unflatten(1, (conv.groups, -1)).movedim(2, -1).contiguous()  # [examples, groups, *positions, channels]
    spatial = len(conv.kernel_size)
    others = zip(conv.kernel_size[1:], conv.stride[1:], conv.dilation[1:], strict=True)
    for dim, (size, stride, dilation) in enumerate(others, 3):
        x = x.unfold(dim, dilation * (size - 1) + 1, stride)[..., ::dilation]
    # [examples, groups, rows, *positions, channels, *kernel]
    channels = 2 + spatial
    positions = prod(x.shape[3:channels])
    x = x.permute(1, 2, 0, *range(3, channels), *range(channels + 1, x.dim()), channels)
    return x.reshape(*x.shape[:2], len(x[0, 0]) * positions, -1), positions
