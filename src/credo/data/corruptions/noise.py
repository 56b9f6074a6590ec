"""Noise on images: each takes floats [n, channels, height, width] in [0, 1], a strength and a generator."""

from __future__ import annotations

import torch
from torch import Tensor


def gaussian(x: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Normal noise on every value: a sensor in the dark."""
    return x + std * torch.randn(x.shape, generator=generator)


def shot(x: Tensor, photons: float, generator: torch.Generator) -> Tensor:
    """Poisson counts of light: noise that grows with the root of the brightness."""
    return torch.poisson(x * photons, generator=generator) / photons


def impulse(x: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Some values are 0 or 1, as of broken pixels."""
    chance = torch.rand(x.shape, generator=generator)
    salt = (chance < share / 2).to(x.dtype)
    return torch.where(chance < share, salt, x)


def speckle(x: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Normal noise in proportion to the value."""
    return x + x * std * torch.randn(x.shape, generator=generator)
