"""Your own images: one folder per class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from credo.core.support.extras import needs
from credo.data.errors import DataCorruptError, DataMissingError
from credo.data.formats.arrays import MOST_BYTES
from credo.data.splits import Dataset, Split, split_validation

if TYPE_CHECKING:
    from PIL import Image

READING = "Reading image files"
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_GREY = ("1", "L")
_PARTS = ("train", "validation", "test")


def load_images(
    *,
    path: str | Path,
    size: int | Sequence[int] | None = None,
    grayscale: bool | None = None,
    test_fraction: float = 0.1,
    seed: int = 0,
) -> Dataset:
    """Load a folder with one folder of images for each class.

    If it has a folder `train`, the classes are in there, those of test images in `test`, and of images for validation
    in `validation`, if there are such folders. Without `test`, a stratified part of the training images is held out.

    Args:
        path: The folder.
        size: Resize all images to squares of this many pixels, or to [height, width], bilinearly and without keeping
            their proportions. None: they must all have the same size.
        grayscale: Convert images to grey, or to colour. None: grey if all of the training images are.
        test_fraction: Fraction of the images for the test split, if there is no folder `test`.
        seed: Seed of the split.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise DataMissingError(f"there is no folder {folder}: give the one that has a folder of images for each class")
    found = {part: folder / part for part in _PARTS if (folder / part).is_dir()}
    if "train" not in found:
        found = {"train": folder}
    classes = sorted(each.name for each in found["train"].iterdir() if each.is_dir() and image_files(each))
    if len(classes) < 2:
        raise ValueError(
            f"{found['train']} has {len(classes)} folders with images: there must be one for each of at least 2 classes"
        )
    shape = None if size is None else _checked_size(size)
    splits: dict[str, Split] = {}
    for part, where in found.items():
        other = sorted(each.name for each in where.iterdir() if each.is_dir() and each.name not in classes)
        if part != "train" and other:
            raise ValueError(f"{where} has the folders {', '.join(other)}, which {found['train']} has not")
        files = [(file, label) for label, name in enumerate(classes) for file in image_files(where / name)]
        if not files:
            raise ValueError(f"{where} has no images in the folders {', '.join(classes)}")
        paths = [file for file, _ in files]
        grayscale = _are_grey(paths) if grayscale is None else grayscale
        x = read_images(paths, size=shape, grayscale=grayscale)
        shape = (x.shape[2], x.shape[3])
        splits[part] = Split(x, torch.tensor([label for _, label in files]))
    train = splits["train"]
    if "test" not in splits:
        train, splits["test"] = split_validation(train, size=test_fraction, seed=seed, stratify=True)
    validation = splits.get("validation")
    return Dataset(folder.name, train, splits["test"], len(classes), class_names=tuple(classes), validation=validation)


def image_files(path: Path) -> list[Path]:
    """Return the images in a folder and those below it, sorted, or the file itself if it is one."""
    if path.is_file():
        return [path] if path.suffix.lower() in SUFFIXES else []
    return sorted(file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in SUFFIXES)


def read_images(files: Sequence[Path], *, size: tuple[int, int] | None, grayscale: bool) -> Tensor:
    """Return images as `uint8 [n, channels, height, width]`.

    Args:
        files: The files.
        size: Height and width to resize to; None raises ValueError if they differ.
        grayscale: Grey instead of colour.
    """
    with needs("cli", READING):
        from PIL import Image, ImageOps

    arrays: list[np.ndarray[Any, Any]] = []
    for file in files:
        with _opened(file) as image:
            upright = ImageOps.exif_transpose(image).convert("L" if grayscale else "RGB")
            if size is not None and (upright.height, upright.width) != size:
                upright = upright.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            arrays.append(np.asarray(upright))
        if arrays[-1].shape != arrays[0].shape:
            (height, width), (first_height, first_width) = arrays[-1].shape[:2], arrays[0].shape[:2]
            raise ValueError(
                f"{file} has {width}x{height} pixels, {files[0]} {first_width}x{first_height}: set data.size, such as "
                "data.size=64, to resize all images"
            )
        if len(files) * arrays[0].size > MOST_BYTES:
            raise ValueError(
                f"{len(files)} images of {arrays[0].shape[1]}x{arrays[0].shape[0]} pixels take more than "
                f"{MOST_BYTES / 2**30:.0f} GiB: set a smaller data.size"
            )
    stacked = torch.from_numpy(np.stack(arrays))
    return stacked.unsqueeze(1) if grayscale else stacked.permute(0, 3, 1, 2).contiguous()


@contextmanager
def _opened(file: Path) -> Iterator[Image.Image]:
    """Open an image; raises DataCorruptError with the file if it is none."""
    with needs("cli", READING):
        from PIL import Image

    try:
        image = Image.open(file)
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataCorruptError(f"{file} cannot be read as an image: {error}") from error
    with image:
        yield image


def _are_grey(files: Sequence[Path]) -> bool:
    def is_grey(file: Path) -> bool:
        with _opened(file) as image:
            return image.mode in _GREY

    return all(is_grey(file) for file in files)


def _checked_size(size: int | Sequence[int]) -> tuple[int, int]:
    pair = [size, size] if isinstance(size, int) else list(size) if isinstance(size, list | tuple) else []
    if len(pair) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in pair):
        raise ValueError(f"size={size!r}: give a number of pixels, or [height, width]")
    return pair[0], pair[1]
