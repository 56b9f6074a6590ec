"""Weather in front of images, generated from random numbers (no photographs of frost or snow)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from credo.data.corruptions.blur import motion, smooth

_FLAKE, _STREAK = 0.012, 0.1
_DROP = 0.03


def snow(x: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """Make `x` paler and draw an `amount` of white streaks from `generator`, in one direction per image."""
    side = max(x.shape[2:])
    grains = torch.rand(len(x), 1, *x.shape[2:], generator=generator)
    flakes = smooth((grains < 0.25 * amount).to(x.dtype), max(_FLAKE * side, 0.4))
    streaks = (2.5 * motion(flakes, _STREAK, generator)).clamp(0, 1)
    grey = x.mean(1, keepdim=True)
    pale = x + 0.5 * amount * (0.5 + 0.5 * grey - x).clamp_min(0)
    return pale + (1 - pale) * streaks


def frost(x: Tensor, opacity: float, generator: torch.Generator) -> Tensor:
    """Cover `x` with this `opacity` by veins of ice from `generator`, thicker towards the border."""
    veins = 1 - (2 * clouds(x, generator, roughness=0.75) - 1).abs()
    height, width = x.shape[2:]
    down = torch.linspace(-1, 1, height).abs()[:, None]
    right = torch.linspace(-1, 1, width).abs()[None, :]
    border = torch.maximum(down, right)
    cover = opacity * (0.45 * veins.pow(2) + 0.55 * border * veins + 0.25)
    ice = 0.75 + 0.25 * veins
    return x + cover.clamp(0, 1) * (ice - x)


def fog(x: Tensor, opacity: float, generator: torch.Generator) -> Tensor:
    """Cover `x` with this `opacity` by a bright, uneven layer from `generator`."""
    cover = opacity * (0.5 + 0.5 * clouds(x, generator, roughness=0.5))
    return x + cover * (0.8 - x)


def spatter(x: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Cover a `fraction` of `x` by blurred drops of mud from `generator`."""
    side = max(x.shape[2:])
    field = smooth(torch.randn(len(x), 1, *x.shape[2:], generator=generator), max(_DROP * side, 0.6))
    limit = field.flatten(1).quantile(1 - fraction, dim=1).view(-1, 1, 1, 1)
    width = field.flatten(1).std(1).view(-1, 1, 1, 1).clamp_min(1e-8)
    cover = torch.sigmoid(4 * (field - limit) / width)
    mud = torch.tensor([0.25, 0.17, 0.08] if x.shape[1] == 3 else [0.18]).view(1, -1, 1, 1)
    return x + 0.9 * cover * (mud - x)


def clouds(x: Tensor, generator: torch.Generator, *, roughness: float) -> Tensor:
    """Return random patterns in [0, 1], [n, 1, height, width]: sums of grids of 2, 4, 8, … points.

    Args:
        x: Images, for number and size.
        generator: Source of the draws.
        roughness: Weight of a grid relative to the next coarser one.
    """
    size = (x.shape[2], x.shape[3])
    total = torch.zeros(len(x), 1, *size)
    points, weight = 2, 1.0
    while points <= max(size):
        grid = torch.randn(len(x), 1, points, points, generator=generator)
        total += weight * F.interpolate(grid, size=size, mode="bilinear", align_corners=True)
        points, weight = 2 * points, weight * roughness
    low, high = total.amin((2, 3), keepdim=True), total.amax((2, 3), keepdim=True)
    return (total - low) / (high - low).clamp_min(1e-8)
