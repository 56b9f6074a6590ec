"""What processing does to images: light, colours, fewer pixels, compression."""

from __future__ import annotations

import io

import numpy as np
import torch
from torch import Tensor

_LUMA = (0.299, 0.587, 0.114)


def brightness(x: Tensor, added: float, generator: torch.Generator) -> Tensor:
    """The same added everywhere; what is white already stays so."""
    return x + added


def contrast(x: Tensor, left: float, generator: torch.Generator) -> Tensor:
    """Differences from the image's own mean, made smaller."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + left * (x - mean)


def saturate(x: Tensor, factor: float, generator: torch.Generator) -> Tensor:
    """Differences from grey, made larger."""
    grey = (x * torch.tensor(_LUMA).view(1, 3, 1, 1)).sum(1, keepdim=True)
    return grey + factor * (x - grey)


def pixelate(x: Tensor, left: float, generator: torch.Generator) -> Tensor:
    """Fewer and larger pixels, means of those they replace; all of whole pixels, so not all of the same size."""
    down, right = (_block_means(side, max(1, round(left * side))) for side in x.shape[2:])
    return down @ x @ right.T


def _block_means(side: int, blocks: int) -> Tensor:
    """The matrix [side, side] that puts the mean of its block in the place of each pixel of a line."""
    block = torch.arange(side) * blocks // side
    same = (block[:, None] == block[None, :]).float()
    return same / same.sum(1, keepdim=True)


def jpeg(x: Tensor, quality: int, generator: torch.Generator) -> Tensor:
    """Through a JPEG file of that quality."""
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
