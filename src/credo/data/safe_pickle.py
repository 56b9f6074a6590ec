"""Pickles of arrays and plain containers, read without running anything that is in the file.

A pickle is a program: `pickle.load` on a downloaded file runs whatever its author wrote. Here every name that the
file may ask for is answered by a stand-in of ours, and any other name is refused. Not even numpy's own reconstruction
runs on the file's word: dtype and shape are checked first.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from credo.data.errors import DataCorruptError


def load_plain_pickle(path: Path) -> object:
    """The containers, numbers, strings and uint8 arrays in the file; anything else is a `DataCorruptError`."""
    try:
        return _plain(_PlainUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load())
    # A damaged pickle fails in many ways, depending on where the machine loses its footing.
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
    ) as error:
        raise DataCorruptError(f"{path} cannot be read as a pickled batch: {error}") from error


class _Dtype:
    """Stands for `numpy.dtype(code)`; its later state (byte order, alignment) means nothing for single bytes."""

    def __init__(self, code: object, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"an array of dtype {code!r}; only unsigned bytes are read")

    def __setstate__(self, state: object) -> None:
        return


class _Array:
    """Stands for `numpy.ndarray`: keeps shape and bytes until the file has been read."""

    def __init__(self, *_: object) -> None:
        self.array: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def __setstate__(self, state: tuple[object, tuple[int, ...], object, bool, bytes]) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes) or math.prod(shape) != len(raw):
            raise pickle.UnpicklingError("an array whose bytes do not fit its shape")
        self.array = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C").copy()


def _latin1(text: str, encoding: str) -> bytes:
    """Stands for `_codecs.encode`, by which Python 3 writes bytes into pickles that Python 2 can read."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes encoded as {encoding!r}; only latin1 is read")
    return text.encode("latin1")


_STAND_INS: dict[tuple[str, str], Callable[..., object]] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _latin1,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused: it could run code")
        return _STAND_INS[module, name]

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError(f"it asks for the outside object {pid!r}, which is refused")


def _plain(value: object) -> object:
    """The value with its stand-ins replaced by arrays, at the top and inside one dict (all that a batch has)."""
    if isinstance(value, dict):
        return {key: item.array if isinstance(item, _Array) else item for key, item in value.items()}
    return value.array if isinstance(value, _Array) else value
