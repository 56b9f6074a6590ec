"""Arrays from NumPy's files: the right numbers, or an error that names the file; never more memory than allowed."""

import io
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from credo.data.errors import DataCorruptError
from credo.data.formats.arrays import read_array

GOOD = np.arange(64.0, dtype=np.float32).reshape(2, 4, 8)


def written(header: bytes, *, version: bytes = b"\x01\x00") -> bytes:
    """An .npy file with a header of our own and no numbers."""
    return b"\x93NUMPY" + version + len(header).to_bytes(2 if version[0] == 1 else 4, "little") + header


def described(shape: str, dtype: str = "'<f4'") -> bytes:
    return written(f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}\n".encode())


@pytest.mark.parametrize("array", [GOOD, GOOD.T, GOOD[:, ::2], GOOD.astype(">f8"), np.zeros(()), np.ones((0, 3))])
def test_arrays_come_back(array: Any, tmp_path: Path) -> None:
    for save, name in ((np.save, "a.npy"), (np.savez, "a.npz"), (np.savez_compressed, "c.npz")):
        save(tmp_path / name, array)  # type: ignore[operator]
        assert np.array_equal(read_array(tmp_path / name), array)


def test_x_is_chosen_among_several(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=GOOD + 1, x=GOOD)
    assert np.array_equal(read_array(tmp_path / "a.npz"), GOOD)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (written(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), "), "cannot be read as numbers"),
        (written(b"(" * 3000), "cannot be read as numbers"),
        (written(b"'''"), "cannot be read as numbers"),
        (described("(2, 3)", "'<f99'"), "cannot be read as numbers"),
        (described("(-1, 3)"), "cannot be read as numbers"),
        (described("(2, 3)", "'|O'"), "Object arrays cannot be loaded"),
        (written(b"{}", version=b"\x03\x00"), "arrays with named columns"),
        (b"some text", "neither an array nor a table"),
        (b"", "neither an array nor a table"),
        (b"PK\x05\x06" + bytes(18), "it holds the arrays none; name the inputs x"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_damaged_headers_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(DataCorruptError, match=rf"a\.npy .*{message}"):
        read_array(tmp_path / "a.npy")


@pytest.mark.parametrize("shape", ["(1000, 1000, 1000)", "(10**3, 10)", f"({10**30},)"])
def test_more_than_allowed_is_not_read(shape: str, tmp_path: Path) -> None:
    """The archive's checksum and compression are right, and it is small: only the header tells."""
    zeros = bytes(4 * 10**6)
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as file:
        file.write(described(shape) + zeros)
    message = "cannot be read" if "**" in shape else r"GiB of numbers; at most 2 GiB are read at once.*several files"
    with pytest.raises(DataCorruptError, match=message):
        read_array(tmp_path / "a.npz")


def test_changed_bytes_are_named_or_mean_nothing(tmp_path: Path) -> None:
    generator = random.Random(0)
    buffer = io.BytesIO()
    np.savez(buffer, x=GOOD)
    whole, path = buffer.getvalue(), tmp_path / "a.npz"
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(generator.choice((1, 3))):
            changed[generator.randrange(len(whole))] = generator.randrange(256)
        path.write_bytes(changed)
        try:
            assert np.array_equal(read_array(path), GOOD)
        except DataCorruptError as error:
            message = str(error)
        else:
            continue
        assert "a.npz cannot be read" in message


def test_truncated_and_longer_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", GOOD)
    whole = (tmp_path / "a.npy").read_bytes()
    for content in (whole[:-1], whole[:200], whole + b"\0"):
        (tmp_path / "a.npy").write_bytes(content)
        with pytest.raises(DataCorruptError, match=r"a\.npy"):
            read_array(tmp_path / "a.npy")


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npy")
    with pytest.raises(DataCorruptError, match="is a pipe, not a regular file"):
        read_array(tmp_path / "a.npy")
