"""Blurs and displacements of images [n, channels, height, width]; lengths are fractions of the longer side."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

_TAPS = 12  # at least; on longer paths one per pixel, else copies become visible


def gaussian(x: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    """Blur `x` with a Gaussian of std `sigma`; `generator` is not used."""
    return smooth(x, sigma * max(x.shape[2:]))


def defocus(x: Tensor, radius: float, generator: torch.Generator) -> Tensor:
    """Blur `x` with a disc of this `radius`, as a lens out of focus does; `generator` is not used.

    The mean over shifts, so that a radius below a pixel blurs, too.
    """
    size = radius * max(x.shape[2:])
    reach = min(math.floor(size) + 1, min(x.shape[2:]) - 1)
    axis = torch.arange(-reach, reach + 1, dtype=x.dtype)
    across = max(41, 2 * math.ceil(size) + 1)  # at least one per pixel, else the disc has holes
    shifts = torch.cartesian_prod(*2 * [torch.linspace(-1, 1, across, dtype=x.dtype)])
    shifts = size * shifts[shifts.square().sum(1) <= 1]
    # Linear interpolation between pixels.
    rows, columns = ((1 - (axis[:, None] - shift).abs()).clamp_min(0) for shift in shifts.T)
    disc = rows @ columns.T
    kernel = (disc / disc.sum()).expand(x.shape[1], 1, -1, -1)
    return F.conv2d(F.pad(x, [reach] * 4, mode="reflect"), kernel, groups=x.shape[1])


def glass(x: Tensor, throw: float, generator: torch.Generator) -> Tensor:
    """Move every pixel of `x` by a normal offset of std `throw` from `generator`, then blur a little: frosted glass."""
    side = max(x.shape[2:])
    offsets = throw * side * torch.randn(len(x), *x.shape[2:], 2, generator=generator)
    return smooth(moved(x, offsets), 0.5 * throw * side)


def motion(x: Tensor, length: float, generator: torch.Generator) -> Tensor:
    """Blur each image of `x` along a line of this `length` in a direction drawn from `generator`."""
    angle = math.pi * torch.rand(len(x), generator=generator)
    path = length * max(x.shape[2:]) * torch.stack([angle.cos(), angle.sin()], dim=1)
    taps = max(_TAPS, math.ceil(length * max(x.shape[2:])) + 1)
    steps = torch.linspace(-0.5, 0.5, taps)
    return sum((moved(x, step * path[:, None, None, :]) for step in steps), torch.zeros_like(x)) / taps


def zoom(x: Tensor, most: float, generator: torch.Generator) -> Tensor:
    """Average enlargements of `x` from 1 to 1 + `most` about the centre; `generator` is not used."""
    height, width = x.shape[2:]
    rows = torch.arange(height, dtype=x.dtype) - (height - 1) / 2
    columns = torch.arange(width, dtype=x.dtype) - (width - 1) / 2
    centred = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1)
    taps = max(_TAPS, math.ceil(most * max(x.shape[2:]) / 2) + 1)
    factors = 1 + torch.linspace(0, most, taps)
    return sum((moved(x, (1 / f - 1) * centred[None]) for f in factors), torch.zeros_like(x)) / taps


def elastic(x: Tensor, shift: float, generator: torch.Generator) -> Tensor:
    """Displace `x` by a smooth random field of std `shift`, drawn from `generator`."""
    side = max(x.shape[2:])
    raw = smooth(torch.randn(len(x), 2, *x.shape[2:], generator=generator), 0.1 * side)
    field = raw / raw.std(dim=(1, 2, 3), keepdim=True).clamp_min(1e-8)
    return moved(x, shift * side * field.permute(0, 2, 3, 1))


def smooth(x: Tensor, sigma: float) -> Tensor:
    """Blur with a Gaussian of `sigma` pixels, along rows and then along columns."""
    reach = min(max(1, math.ceil(3 * sigma)), min(x.shape[2:]) - 1)
    axis = torch.arange(-reach, reach + 1, dtype=x.dtype)
    line = torch.exp(-axis.square() / (2 * sigma**2))
    line = (line / line.sum()).expand(x.shape[1], 1, 1, -1)
    x = F.conv2d(F.pad(x, [reach, reach, 0, 0], mode="reflect"), line, groups=x.shape[1])
    return F.conv2d(F.pad(x, [0, 0, reach, reach], mode="reflect"), line.transpose(2, 3), groups=x.shape[1])


def moved(x: Tensor, offsets: Tensor) -> Tensor:
    """Sample each pixel at its position plus `offsets` (right, down, in pixels), broadcast to [n, height, width, 2]."""
    height, width = x.shape[2:]
    rows, columns = torch.arange(height, dtype=x.dtype), torch.arange(width, dtype=x.dtype)
    positions = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1) + offsets
    scale = torch.tensor([max(width - 1, 1), max(height - 1, 1)], dtype=x.dtype)
    grid = (2 * positions / scale - 1).expand(len(x), height, width, 2)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=True)
