"""Read .npy and .npz files, after their header was checked."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from credo.core.support.files import require_file
from credo.data.errors import DataCorruptError

MOST_BYTES = 2 * 2**30
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_array(path: Path) -> np.ndarray[Any, Any]:
    """Return the array of an .npy file, or from an .npz archive the array `x`, else the only one.

    Never runs code from the file. Raises DataCorruptError if it is damaged or holds more than 2 GiB of numbers: a
    compressed archive of a few megabytes can hold any number of them.
    """
    with _explained(path), path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            return _read(file)
        with zipfile.ZipFile(file) as archive, archive.open(_chosen(archive)) as member:
            return _read(member)


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return all arrays of an .npz archive by name, or that of an .npy file as `x`; as careful as `read_array`."""
    with _explained(path), path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            return {"x": _read(file)}
        found = {}
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:
                    found[name.removesuffix(".npy")] = _read(member)
        return found


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        require_file(path)
        yield
    except Exception as error:  # damaged headers raise errors of many types
        raise DataCorruptError(f"{path} cannot be read as numbers, from .npy, .npz or .csv: {error}") from error


def _chosen(archive: zipfile.ZipFile) -> str:
    names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    if "x" not in names and len(names) != 1:
        raise ValueError(f"it holds the arrays {', '.join(names) or 'none'}; name the inputs x")
    return "x.npy" if "x" in names else f"{names[0]}.npy"


def _read(file: IO[bytes]) -> np.ndarray[Any, Any]:
    _check_header(file)
    file.seek(0)
    array: np.ndarray[Any, Any] = np.lib.format.read_array(file, allow_pickle=False)
    if file.read(1):  # also compares the checksum of an archive member
        raise ValueError("it continues after its array")
    return array


def _check_header(file: IO[bytes]) -> None:
    start = file.read(len(np.lib.format.MAGIC_PREFIX))
    if start != np.lib.format.MAGIC_PREFIX:
        raise ValueError("it is neither an array nor a table")
    version = tuple(file.read(2))
    if version not in _HEADERS:
        raise ValueError(f"it has format {version}, of arrays with named columns; give plain ones")
    shape, _, dtype = _HEADERS[version](file)
    size = math.prod(shape) * dtype.itemsize
    if size > MOST_BYTES:
        raise ValueError(
            f"it holds {size / 2**30:.1f} GiB of numbers; at most {MOST_BYTES / 2**30:.0f} GiB are read at once. "
            "Predict them in several files."
        )
