"""Noise on images, floats [n, channels, height, width] in [0, 1]."""

from __future__ import annotations

import torch
from torch import Tensor


def gaussian(x: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Add normal noise of this `std` from `generator` to `x`."""
    return x + std * torch.randn(x.shape, generator=generator)


def shot(x: Tensor, photons: float, generator: torch.Generator) -> Tensor:
    """Replace `x` by Poisson counts from `generator`, with so many `photons` for white."""
    return torch.poisson(x * photons, generator=generator) / photons


def impulse(x: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Set a `fraction` of the values of `x`, chosen by `generator`, to 0 or 1."""
    chance = torch.rand(x.shape, generator=generator)
    salt = (chance < fraction / 2).to(x.dtype)
    return torch.where(chance < fraction, salt, x)


def speckle(x: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Add to `x` normal noise from `generator` with `std` times the value as standard deviation."""
    return x + x * std * torch.randn(x.shape, generator=generator)
