"""Changes by image processing: brightness, colours, resolution, compression."""

from __future__ import annotations

import io

import numpy as np
import torch
from torch import Tensor

from credo.core.support.extras import needs

_LUMA = (0.299, 0.587, 0.114)


def brightness(x: Tensor, added: float, generator: torch.Generator) -> Tensor:
    """Add the number `added` to all values of `x`; `generator` is not used."""
    return x + added


def contrast(x: Tensor, left: float, generator: torch.Generator) -> Tensor:
    """Multiply the differences of `x` from each image's mean by `left`; `generator` is not used."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + left * (x - mean)


def saturate(x: Tensor, factor: float, generator: torch.Generator) -> Tensor:
    """Multiply the differences of `x` from grey by `factor`; `generator` is not used."""
    grey = (x * torch.tensor(_LUMA).view(1, 3, 1, 1)).sum(1, keepdim=True)
    return grey + factor * (x - grey)


def pixelate(x: Tensor, left: float, generator: torch.Generator) -> Tensor:
    """Replace blocks of whole pixels by their means, so that the fraction `left` per side of `x` remains.

    `generator` is not used.
    """
    down, right = (_block_means(side, max(1, round(left * side))) for side in x.shape[2:])
    return down @ x @ right.T


def _block_means(side: int, blocks: int) -> Tensor:
    """Return the matrix [side, side] that replaces each pixel of a line by the mean of its block."""
    block = torch.arange(side) * blocks // side
    same = (block[:, None] == block[None, :]).float()
    return same / same.sum(1, keepdim=True)


def jpeg(x: Tensor, quality: int, generator: torch.Generator) -> Tensor:
    """Encode and decode `x` as JPEG of this `quality`; `generator` is not used."""
    with needs("cli", "The corruption jpeg"):
        from PIL import Image  # slow to import, and only this kind needs it

    pixels = (x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    results = []
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image if image.shape[2] == 3 else image[:, :, 0]).save(file, format="JPEG", quality=quality)
        with Image.open(file) as opened:
            decoded = np.asarray(opened, dtype=np.uint8)
        results.append(torch.from_numpy(decoded.reshape(image.shape).copy()))
    return torch.stack(results).permute(0, 3, 1, 2).float() / 255
