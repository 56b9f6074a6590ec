"""`credo predict` on files that are wrong: exit code 2, one message with the file's name, nothing run from inside."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Refused = Callable[..., str]
GOOD = np.zeros((2, 1, 8, 8), dtype=np.float32)


class Malicious:
    """Unpickled, it would leave a folder behind."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 9, 9)), "holds inputs of shape (9, 9); the run needs (1, 8, 8) for each"),
        (np.zeros((2, 3, 8, 8)), "holds inputs of shape (3, 8, 8); the run needs (1, 8, 8)"),
        (np.zeros(64), "holds inputs of shape ()"),
        (np.zeros(()), "holds inputs of shape ()"),
        (np.zeros((0, 1, 8, 8)), "holds no input"),
        (np.full((2, 8, 8), np.nan), "holds NaN or infinite values"),
        (np.full((2, 8, 8), np.inf), "holds NaN or infinite values"),
        (np.full((2, 8, 8), 256), "holds integers from 256 to 256; pixels are 0 to 255"),
        (np.full((2, 8, 8), -1), "holds integers from -1 to -1"),
        (np.full((2, 8, 8), 1j), "holds complex128 values"),
        (np.array(["a", "b"]), "holds <U1 values"),
        (np.array([Malicious()], dtype=object), "Object arrays cannot be loaded"),
    ],
    ids=lambda value: value.split(";")[0] if isinstance(value, str) else "",
)
@pytest.mark.parametrize("suffix", ["npz", "npy"])
def test_arrays_that_do_not_fit(refused: Refused, digits_run: Path, array: Any, message: str, suffix: str) -> None:
    path = Path(f"inputs.{suffix}")
    if suffix == "npz":
        np.savez(path, x=array)
    else:
        np.save(path, array)
    found = refused("predict", digits_run, path)
    assert found.startswith(str(path))
    assert message in found
    assert not Path("harm").exists()


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :]


@pytest.mark.parametrize("damage", [truncated, flipped, lambda c: b"", lambda c: b"some text", lambda c: b"PK\x03\x04"])
def test_damaged_archives(refused: Refused, digits_run: Path, damage: Callable[[bytes], bytes]) -> None:
    path = Path("inputs.npz")
    np.savez(path, x=GOOD)
    path.write_bytes(damage(path.read_bytes()))
    assert "inputs.npz cannot be read as numbers" in refused("predict", digits_run, path)


def test_several_arrays_without_a_name(refused: Refused, digits_run: Path) -> None:
    np.savez("inputs.npz", a=GOOD, b=GOOD)
    assert "it holds the arrays a, b; name the inputs x" in refused("predict", digits_run, "inputs.npz")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\nword\n", "'word' is not a finite number"),
        ("1\n\n2,3\n", "row 3"),
        ("", "holds inputs of shape (0,)"),
        ("x\n", "holds no input"),
        ("1,2\n3,4\n", "holds inputs of shape (2,); the run needs (1,) for each"),
        ("nan\n", "'nan' is not a finite number"),
    ],
)
def test_tables_that_do_not_fit(refused: Refused, gap_run: Path, text: str, message: str) -> None:
    Path("inputs.csv").write_text(text)
    found = refused("predict", gap_run, "inputs.csv")
    assert found.startswith("inputs.csv")
    assert message in found


def test_files_that_are_not_there(refused: Refused, digits_run: Path, tmp_path: Path) -> None:
    assert "There is no file nothing.npz" in refused("predict", digits_run, "nothing.npz")
    assert "has no images: there is no file that ends with .png" in refused("predict", digits_run, tmp_path)
    (tmp_path / "page.md").write_text("# No numbers\n")
    message = refused("predict", digits_run, tmp_path / "page.md")
    assert "from .npy, .npz or .csv" in message
    assert "pickle" not in message, "loading never runs code, and nobody should be told how to"
    np.savez("inputs.npz", x=GOOD)
    assert "nothing is no run" in refused("predict", "nothing", "inputs.npz")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--draws", "0"), "draws=0"),
        (("--tolerance", "-1"), "tolerance=-1.0 must be positive"),
        (("--output", "rows.xls"), "--output rows.xls: write to a .csv, .json or .npz file"),
    ],
)
def test_bad_options(refused: Refused, digits_run: Path, options: tuple[str, ...], message: str) -> None:
    np.savez("inputs.npz", x=GOOD)
    assert message in refused("predict", digits_run, "inputs.npz", *options)
