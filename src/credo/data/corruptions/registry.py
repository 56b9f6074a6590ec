"""Corrupted images for studies of distribution shift: nineteen kinds at five severities, reproducible by seed.

The kinds are those of Hendrycks and Dietterich (2019); code and severities are ours, so results cannot be compared with
published ones on CIFAR-10-C or ImageNet-C. Lengths are fractions of the image's side, so blurs, weather and elastic
look alike at 32 and at 224 pixels, except snow, whose flakes are single pixels before the blur: on large images it is
haze. Noise, the blocks of pixelate and JPEG work on pixels.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.core.errors import unknown
from credo.data.corruptions import blur, digital, noise, weather

SEVERITIES = (1, 2, 3, 4, 5)
# Numbers in memory at once: large images are processed in small parts.
_PART = 2**23


@dataclass(frozen=True)
class Corruption:
    """One kind: `apply(images, strength, generator)` on floats in [0, 1], with the strength at each severity."""

    apply: Callable[[Tensor, Any, torch.Generator], Tensor]
    strengths: tuple[Any, Any, Any, Any, Any]
    about: str
    colour: bool = False
    """Whether it needs colours."""


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian-noise": Corruption(noise.gaussian, (0.04, 0.08, 0.12, 0.17, 0.23), "std of the noise"),
    "shot-noise": Corruption(noise.shot, (220.0, 90.0, 45.0, 22.0, 12.0), "photons of a white pixel"),
    "impulse-noise": Corruption(noise.impulse, (0.01, 0.03, 0.06, 0.11, 0.18), "fraction of values that are 0 or 1"),
    "defocus-blur": Corruption(blur.defocus, (0.022, 0.034, 0.046, 0.06, 0.078), "radius of the disc"),
    "glass-blur": Corruption(blur.glass, (0.014, 0.022, 0.031, 0.041, 0.053), "std of the pixels' displacement"),
    "motion-blur": Corruption(blur.motion, (0.08, 0.13, 0.18, 0.24, 0.31), "length of the path"),
    "zoom-blur": Corruption(blur.zoom, (0.08, 0.13, 0.19, 0.26, 0.34), "largest enlargement"),
    "snow": Corruption(weather.snow, (0.15, 0.26, 0.37, 0.48, 0.6), "amount"),
    "frost": Corruption(weather.frost, (0.2, 0.32, 0.44, 0.56, 0.68), "opacity"),
    "fog": Corruption(weather.fog, (0.25, 0.38, 0.5, 0.62, 0.74), "opacity"),
    "brightness": Corruption(digital.brightness, (0.08, 0.16, 0.24, 0.33, 0.43), "added to all values"),
    "contrast": Corruption(digital.contrast, (0.75, 0.58, 0.43, 0.3, 0.18), "remaining contrast"),
    "elastic": Corruption(blur.elastic, (0.012, 0.02, 0.028, 0.037, 0.048), "std of the displacement"),
    "pixelate": Corruption(digital.pixelate, (0.8, 0.65, 0.5, 0.4, 0.3), "remaining fraction of pixels per side"),
    "jpeg": Corruption(digital.jpeg, (50, 30, 18, 12, 8), "quality of the file"),
    "speckle-noise": Corruption(noise.speckle, (0.08, 0.15, 0.22, 0.32, 0.45), "std, as a fraction of the value"),
    "gaussian-blur": Corruption(blur.gaussian, (0.014, 0.022, 0.031, 0.041, 0.053), "std of the kernel"),
    "spatter": Corruption(weather.spatter, (0.06, 0.11, 0.17, 0.24, 0.32), "covered fraction of the image"),
    "saturate": Corruption(digital.saturate, (1.5, 2.0, 3.0, 4.5, 7.0), "factor of the colours", colour=True),
}
COMMON = tuple(CORRUPTIONS)[:15]
EXTRA = tuple(CORRUPTIONS)[15:]


def corrupt(images: Tensor, kind: str, severity: int, *, seed: int = 0) -> Tensor:
    """Return corrupted images of the same shape and dtype.

    Args:
        images: [n, channels, height, width], bytes or floats in [0, 1].
        kind: A name in `CORRUPTIONS`.
        severity: 1 to 5.
        seed: Equal images and seed give equal results; draws differ between images, kinds and severities.
    """
    _check(images, kind, severity)
    chosen = CORRUPTIONS[kind]
    digest = hashlib.sha256(f"{kind} {severity} {seed}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    strength = chosen.strengths[severity - 1]
    rows = max(1, _PART // max(1, images[:1].numel()))
    parts = []
    for part in images.split(rows):
        x = part.cpu().float() / 255 if part.dtype == torch.uint8 else part.cpu().float()
        changed = chosen.apply(x, strength, generator).clamp_(0, 1)
        parts.append(changed.mul_(255).round_().to(torch.uint8) if part.dtype == torch.uint8 else changed)
    return torch.cat(parts).to(device=images.device, dtype=images.dtype)


def corruption_kinds(choice: str = "common", *, channels: int = 3) -> tuple[str, ...]:
    """Return the names of kinds, in the order given, each once.

    Args:
        choice: "common" (fifteen), "extra" (four), "all", names of kinds, or several of these separated by commas.
        channels: For images of one channel, groups leave out kinds that need colours; such a name raises ValueError.
    """
    groups = {"common": COMMON, "extra": EXTRA, "all": tuple(CORRUPTIONS)}
    names = [name.strip() for name in choice.split(",") if name.strip()]
    if not names:
        raise ValueError(f"No kind of corruption in {choice!r}; possible: {', '.join([*groups, *CORRUPTIONS])}.")
    kinds: list[str] = []
    for name in names:
        if name in groups:
            kinds += [kind for kind in groups[name] if channels == 3 or not CORRUPTIONS[kind].colour]
            continue
        if name not in CORRUPTIONS:
            raise ValueError(unknown("corruption", name, [*groups, *CORRUPTIONS]))
        _check_colours(name, channels)
        kinds.append(name)
    return tuple(dict.fromkeys(kinds))


def _check(images: Tensor, kind: str, severity: int) -> None:
    if kind not in CORRUPTIONS:
        raise ValueError(unknown("corruption", str(kind), CORRUPTIONS))
    if not _is_severity(severity):
        raise ValueError(f"severity={severity!r}: possible are 1 to 5, as whole numbers; 0 is the clean image.")
    if not isinstance(images, Tensor):
        raise TypeError(
            f"Images are a tensor [n, 1 or 3 channels, height, width]; got {type(images).__name__}: "
            "torch.as_tensor converts it."
        )
    if images.dim() != 4 or images.shape[1] not in (1, 3) or len(images) == 0:
        raise ValueError(f"Images are [n, 1 or 3 channels, height, width]; got shape {list(images.shape)}.")
    _check_colours(kind, images.shape[1])
    if images.dtype != torch.uint8 and not (images.is_floating_point() and _in_unit(images)):
        raise ValueError(
            "Images are bytes, or floats in [0, 1]: undo any normalisation first, models of Credo have their own."
        )


def _is_severity(value: Any) -> bool:
    try:  # NumPy and torch integers are indices, too; 2.0 is not
        return not isinstance(value, bool) and operator.index(value) in SEVERITIES
    except TypeError:
        return False


def _check_colours(kind: str, channels: int) -> None:
    if CORRUPTIONS[kind].colour and channels != 3:
        raise ValueError(f"{kind} changes colours; these images have {channels} channel.")


def _in_unit(images: Tensor) -> bool:
    low, high = torch.aminmax(images)
    return bool(low >= 0) and bool(high <= 1)
