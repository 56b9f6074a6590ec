"""Random flips and shifts of a batch of images, without a loop over images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Augment = Callable[[Tensor, torch.Generator], Tensor]


def augment_flip_crop(x: Tensor, generator: torch.Generator, *, pad: int = 4, flip: bool = True) -> Tensor:
    """Each image mirrored with probability one half, padded by `pad` zeros and cropped back at a random place.

    The usual augmentation for CIFAR (He et al., 2016). `x` is `[batch, channels, height, width]`; zero must mean
    black, so normalise inside the model. Draws come from the generator's device, so they repeat on any device.
    """
    if x.dim() != 4:
        raise ValueError(f"images are [batch, channels, height, width]; got shape {list(x.shape)}")
    mirrored, down, right = draw_flip_crop(len(x), generator, pad=pad, flip=flip)
    return flip_crop(x, mirrored, down, right, pad=pad)


def augment_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image mirrored left to right with probability one half; nothing is shifted."""
    return augment_flip_crop(x, generator, pad=0)


def no_augmentation(x: Tensor, generator: torch.Generator) -> Tensor:
    """The batch as it is; the generator is not used."""
    return x


def draw_flip_crop(count: int, generator: torch.Generator, *, pad: int, flip: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Which images to mirror `bool [count]`, and where each crop begins in the padded image (row, column)."""
    device = generator.device
    mirrored = torch.rand(count, generator=generator, device=device) < (0.5 if flip else 0.0)
    down, right = torch.randint(0, 2 * pad + 1, (2, count), generator=generator, device=device)
    return mirrored, down, right


def flip_crop(x: Tensor, mirrored: Tensor, down: Tensor, right: Tensor, *, pad: int) -> Tensor:
    """The images mirrored where asked, padded and cropped at `down`, `right`."""
    mirrored, down, right = (values.to(x.device) for values in (mirrored, down, right))
    x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
    if pad == 0:
        return x
    # All crops of all images as a view; picking one crop an image copies only what is kept.
    crops = F.pad(x, (pad, pad, pad, pad)).unfold(2, x.shape[2], 1).unfold(3, x.shape[3], 1)
    return crops[torch.arange(len(x), device=x.device), :, down, right]


AUGMENTATIONS: dict[str, Augment] = {
    "none": no_augmentation,
    "flip": augment_flip,
    "flip-crop": augment_flip_crop,
}
