"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) from the binary or Python version of the official archives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from credo.data.errors import DataCorruptError, DataMissingError
from credo.data.formats.safe_pickle import load_plain_pickle
from credo.data.splits import Dataset, Split

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class CifarLayout:
    """The files of one of the two official archives."""

    folder: str
    train: tuple[str, ...]
    test: str
    pickled: bool

    @property
    def files(self) -> tuple[str, ...]:
        """All paths, relative to the data set's folder."""
        return tuple(f"{self.folder}/{name}" for name in (*self.train, self.test))


_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR10_LAYOUTS = (
    CifarLayout("cifar-10-batches-bin", tuple(f"{n}.bin" for n in _BATCHES), "test_batch.bin", pickled=False),
    CifarLayout("cifar-10-batches-py", _BATCHES, "test_batch", pickled=True),
)
CIFAR100_LAYOUTS = (
    CifarLayout("cifar-100-binary", ("train.bin",), "test.bin", pickled=False),
    CifarLayout("cifar-100-python", ("train",), "test", pickled=True),
)


def load_cifar10(name: str, folder: Path) -> Dataset:
    """Load images `uint8 [n, 3, 32, 32]` in ten classes."""
    return _load(name, folder, CIFAR10_LAYOUTS, classes=10, label_bytes=1, label_key="labels")


def load_cifar100(name: str, folder: Path) -> Dataset:
    """Load images `uint8 [n, 3, 32, 32]` in a hundred (fine) classes; the twenty coarse labels are not read."""
    return _load(name, folder, CIFAR100_LAYOUTS, classes=100, label_bytes=2, label_key="fine_labels")


def read_cifar_binary(path: Path, *, classes: int, label_bytes: int) -> Split:
    """Read rows of label bytes and 3072 pixel bytes, red plane first.

    Args:
        path: The file.
        classes: Number of classes.
        label_bytes: Label bytes per row; the last one is used (coarse before fine).
    """
    rows = np.fromfile(path, dtype=np.uint8)
    width = label_bytes + _PIXELS
    if len(rows) == 0 or len(rows) % width:
        raise DataCorruptError(f"{path} is truncated: {len(rows)} bytes are not rows of {width} bytes")
    rows = rows.reshape(-1, width)
    return _split(path, rows[:, label_bytes:], rows[:, label_bytes - 1], classes)


def read_cifar_pickle(path: Path, *, classes: int, label_key: str) -> Split:
    """Read the same from a pickled batch, without running code from it.

    Args:
        path: The file.
        classes: Number of classes.
        label_key: Key of the labels.
    """
    content = load_plain_pickle(path)
    if not isinstance(content, dict):
        raise DataCorruptError(f"{path} is not a CIFAR batch: it holds a {type(content).__name__}, not a dict")
    # The official files were pickled by Python 2, whose strings arrive as bytes.
    batch = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in content.items()}
    pixels, labels = batch.get("data"), batch.get(label_key)
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise DataCorruptError(f"{path} is not a CIFAR batch: 'data' is not an array of [n, {_PIXELS}] bytes")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise DataCorruptError(f"{path} is not a CIFAR batch: {label_key!r} is not a list of whole numbers")
    return _split(path, pixels, np.asarray(labels, dtype=np.int64), classes)


def _split(path: Path, pixels: np.ndarray, labels: np.ndarray, classes: int) -> Split:
    if len(pixels) != len(labels):
        raise DataCorruptError(f"{path} has {len(pixels)} images and {len(labels)} labels")
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise DataCorruptError(f"{path} holds label {wrong[0]}; labels go from 0 to {classes - 1}")
    images = torch.from_numpy(np.ascontiguousarray(pixels)).reshape(-1, 3, 32, 32)
    return Split(images, torch.from_numpy(labels.astype(np.int64)))


def _load(
    name: str, folder: Path, layouts: tuple[CifarLayout, ...], *, classes: int, label_bytes: int, label_key: str
) -> Dataset:
    layout = next((one for one in layouts if all((folder / path).is_file() for path in one.files)), None)
    if layout is None:
        choices = " or ".join(one.folder for one in layouts)
        raise DataMissingError(f"{folder} has no complete {choices}")

    def read(file: str) -> Split:
        path = folder / layout.folder / file
        if layout.pickled:
            return read_cifar_pickle(path, classes=classes, label_key=label_key)
        return read_cifar_binary(path, classes=classes, label_bytes=label_bytes)

    parts = [read(file) for file in layout.train]
    train = Split(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
    return Dataset(name, train, read(layout.test), classes)
