"""Random flips and crops of a batch of images, vectorised."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Augment = Callable[[Tensor, torch.Generator], Tensor]


def augment_flip_crop(x: Tensor, generator: torch.Generator, *, pad: int = 4, flip: bool = True) -> Tensor:
    """Flip images with probability one half, pad them with zeros and crop them back at random positions.

    The usual augmentation for CIFAR (He et al., 2016).

    Args:
        x: Images [batch, channels, height, width] in which zero is black: normalise inside the model.
        generator: Source of the draws, which repeat on any device.
        pad: Pixels of padding on each side.
        flip: Whether to flip.
    """
    if x.dim() != 4:
        raise ValueError(f"images are [batch, channels, height, width]; got shape {list(x.shape)}")
    mirrored, down, right = draw_flip_crop(len(x), generator, pad=pad, flip=flip)
    return flip_crop(x, mirrored, down, right, pad=pad)


def augment_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Flip images left to right with probability one half, without cropping."""
    return augment_flip_crop(x, generator, pad=0)


def no_augmentation(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return the batch unchanged."""
    return x


def draw_flip_crop(count: int, generator: torch.Generator, *, pad: int, flip: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Draw which images to flip (bool [count]), and the row and column where each crop begins in the padded image.

    Args:
        count: Number of images.
        generator: Source of the draws.
        pad: Pixels of padding.
        flip: Whether to flip at all.
    """
    device = generator.device
    mirrored = torch.rand(count, generator=generator, device=device) < (0.5 if flip else 0.0)
    down, right = torch.randint(0, 2 * pad + 1, (2, count), generator=generator, device=device)
    return mirrored, down, right


def flip_crop(x: Tensor, mirrored: Tensor, down: Tensor, right: Tensor, *, pad: int) -> Tensor:
    """Flip, pad and crop images.

    Args:
        x: Images [batch, channels, height, width].
        mirrored: Which images to flip.
        down: First row of each crop.
        right: First column of each crop.
        pad: Pixels of padding.
    """
    mirrored, down, right = (values.to(x.device) for values in (mirrored, down, right))
    x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
    if pad == 0:
        return x
    # All crops of all images as a view; picking one crop per image copies only that.
    crops = F.pad(x, (pad, pad, pad, pad)).unfold(2, x.shape[2], 1).unfold(3, x.shape[3], 1)
    return crops[torch.arange(len(x), device=x.device), :, down, right]


AUGMENTATIONS: dict[str, Augment] = {
    "none": no_augmentation,
    "flip": augment_flip,
    "flip-crop": augment_flip_crop,
}
