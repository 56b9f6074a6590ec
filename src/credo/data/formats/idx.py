"""The idx format of MNIST and its relatives (LeCun et al., 1998), plain or gzipped."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from credo.data.errors import DataCorruptError, DataMissingError
from credo.data.files import plain_or_zipped
from credo.data.splits import Dataset, Split

_UNSIGNED_BYTE = 0x08
_CLASSES = 10


def read_idx(path: Path) -> Tensor:
    """Return the file's array as uint8, in the shape of its header.

    Only unsigned bytes are supported, which all image sets in this format have.
    """
    content = _read(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[3] == 0:
        raise DataCorruptError(f"{path} is not an idx file: it starts with {bytes(content[:4])!r}")
    if content[2] != _UNSIGNED_BYTE:
        raise DataCorruptError(f"{path} holds idx type 0x{content[2]:02x}; only unsigned bytes (0x08) are read")
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) != start + math.prod(shape):
        fault = "truncated" if len(content) < start + math.prod(shape) else "too long"
        raise DataCorruptError(
            f"{path} is {fault}: its header states {shape} ({start + math.prod(shape)} bytes), "
            f"it has {len(content)} bytes"
        )
    if math.prod(shape):
        return torch.frombuffer(content, dtype=torch.uint8, offset=start).reshape(shape)
    try:
        return torch.empty(shape, dtype=torch.uint8)
    except RuntimeError as error:  # dimensions whose product overflows, besides one of 0
        raise DataCorruptError(f"{path} is not an idx file: its header states {shape}") from error


def load_idx(name: str, folder: Path) -> Dataset:
    """Load images `uint8 [n, 1, height, width]` in ten classes.

    Without training files (notMNIST is often a test set only) the training split is empty.
    """
    test = _load_pair(folder, "t10k")
    train = _load_pair(folder, "train")
    if test is None:
        raise DataMissingError(f"{folder} has no t10k-images-idx3-ubyte(.gz) and t10k-labels-idx1-ubyte(.gz)")
    return Dataset(name, train or Split(test.x[:0], test.y[:0]), test, _CLASSES)


def _load_pair(folder: Path, prefix: str) -> Split | None:
    names = f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"
    found = [plain_or_zipped(folder / name) for name in names]
    if found == [None, None]:
        return None
    images_path, labels_path = found
    if images_path is None or labels_path is None:
        missing = names[found.index(None)]
        raise DataMissingError(f"{folder} has one file of a pair: add {missing} or {missing}.gz")
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        raise DataCorruptError(
            f"{images_path} {list(images.shape)} and {labels_path} {list(labels.shape)} do not belong together: "
            "expected [n, height, width] and [n]"
        )
    if len(labels) and int(labels.max()) >= _CLASSES:
        raise DataCorruptError(f"{labels_path} holds label {int(labels.max())}; labels go from 0 to {_CLASSES - 1}")
    return Split(images.unsqueeze(1), labels.long())


def _read(path: Path) -> bytearray:
    # A bytearray, because torch warns about sharing read-only memory.
    if path.suffix != ".gz":
        return bytearray(path.read_bytes())
    try:
        with gzip.open(path) as file:
            return bytearray(file.read())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataCorruptError(f"{path} cannot be decompressed, it is truncated or damaged: {error}") from error
