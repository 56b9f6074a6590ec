"""Small pictures inside the page: tensors as PNG in data addresses."""

from __future__ import annotations

import base64
import struct
import zlib

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST = 64  # pixels a side: a report is an overview, and must stay small


def is_picture(shape: tuple[int, ...]) -> bool:
    """Whether examples of this shape can be shown: [1 or 3, height, width]."""
    return len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) > 1


def data_address(image: Tensor) -> str:
    """An image `[channels, height, width]`, uint8 or float in [0, 1], as `data:image/png;base64,…`.

    Larger ones are reduced to 64 pixels a side by averaging.
    """
    return "data:image/png;base64," + base64.b64encode(png(_bytes(image))).decode("ascii")


def png(pixels: Tensor) -> bytes:
    """The file of `uint8 [height, width, 1 or 3]`, written out here: a picture is no reason for a dependency."""
    height, width, channels = pixels.shape
    if channels not in (1, 3):
        raise ValueError(f"{channels} channels: a picture has 1 (grey) or 3 (red, green, blue)")
    rows = pixels.reshape(height, width * channels)
    unfiltered = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), rows.cpu()], dim=1)
    head = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    body = zlib.compress(unfiltered.contiguous().numpy().tobytes(), 9)
    chunks = _chunk(b"IHDR", head) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _bytes(image: Tensor) -> Tensor:
    pixels = image.float() / 255 if image.dtype == torch.uint8 else image.float()
    factor = -(-max(pixels.shape[1:]) // LARGEST)
    if factor > 1:
        pixels = F.avg_pool2d(pixels, min(factor, *pixels.shape[1:]), ceil_mode=True)
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)
