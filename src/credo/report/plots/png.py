"""Small images inside the page: tensors as PNG data URLs."""

from __future__ import annotations

import base64
import io

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

LARGEST = 64  # pixels per side, which keeps the report small


def is_picture(shape: tuple[int, ...]) -> bool:
    """Whether examples of this shape can be shown: [1 or 3, height, width]."""
    return len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) > 1


def data_url(image: Tensor) -> str:
    """An image [1 or 3, height, width], uint8 or float in [0, 1], as `data:image/png;base64,…`.

    Larger images are reduced to 64 pixels per side by averaging.
    """
    pixels = _pixels(image).cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG", compress_level=9)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def _pixels(image: Tensor) -> Tensor:
    """uint8 [height, width, channels]."""
    pixels = image.float() / 255 if image.dtype == torch.uint8 else image.float()
    factor = -(-max(pixels.shape[1:]) // LARGEST)
    if factor > 1:
        pixels = F.avg_pool2d(pixels, min(factor, *pixels.shape[1:]), ceil_mode=True)
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
