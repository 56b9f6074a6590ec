"""Files that are either the old version or the new one, never half of it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new file beside `path`, make sure it is on disk, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def folder_for(path: Path, *, left_over: str = "") -> Iterator[None]:
    """Make the folder; if what is inside fails, those made for it go again as far as they are empty.

    A file named `left_over` goes, too, if it is the only one.
    """
    made = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if made and [file.name for file in path.iterdir()] == [left_over]:
            (path / left_over).unlink()
        for place in made:
            with suppress(OSError):  # something is in it
                place.rmdir()
        raise


def write_text(path: Path, text: str) -> None:
    """Write text atomically."""
    write_atomically(path, lambda temporary: _write(temporary, text))


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON atomically; NaN and infinities become null, which every reader understands."""
    write_text(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The value with numbers that JSON has no word for replaced by None."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
