"""Files that are either the old version or the new one, never half of it."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from credo.core.errors import CredoError, FileFormatError

_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFullError(CredoError, OSError):
    """There was no space for a file; those from before are as they were."""


def write_atomically(path: Path, write: Callable[[Path], None], *, keep: int = 1) -> None:
    """Let `write` fill a new file beside `path`, make sure it is on disk, then rename it into place.

    With `keep` above 1 the file that was there becomes `earlier(path, 1)`, that one `earlier(path, 2)`, and so on. A
    full disk is a `DiskFullError`; the files from before are as they were. A new file gets the permissions that the
    umask allows, one that replaces another those of the other.
    """
    with _full_disk_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        mode = _create(temporary, like=path)
        try:
            write(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.chmod(mode)
            _rotate(path, keep)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _create(temporary: Path, *, like: Path) -> int:
    """Make the empty file, private if it is to replace another; the permissions that it should end with."""
    old = stat.S_IMODE(like.stat().st_mode) if like.is_file() else None
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if old is None else 0o600)
    try:
        return stat.S_IMODE(os.fstat(handle).st_mode) if old is None else old
    finally:
        os.close(handle)


def require_file(path: Path) -> None:
    """Raises FileNotFoundError if there is nothing at `path`, FileFormatError if it is a folder, pipe or device.

    A pipe that nobody writes to would be waited for, and some devices never end.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}.")
    if not path.is_file():
        raise FileFormatError(f"{path} is a {kind_of(path)}, not a regular file: give the path of a file.")


def kind_of(path: Path) -> str:
    """What is there that is no regular file."""
    return "folder" if path.is_dir() else "pipe" if path.is_fifo() else "device or socket"


def cache_home() -> Path:
    """The user's cache: `$XDG_CACHE_HOME`, which the XDG specification says to ignore unless it is absolute."""
    given = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return given if given.is_absolute() else Path("~/.cache").expanduser()


def earlier(path: Path, age: int) -> Path:
    """Where the version before the present one is kept (`age` 1), or one still older: checkpoint.1.pt."""
    return path.with_name(f"{path.stem}.{age}{path.suffix}") if age else path


def left_overs(path: Path) -> list[Path]:
    """What writers of `path` that were killed left beside it, newest first; never of one that is writing now."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.([a-z0-9_]{{8}}|link)\.part")
    found = [place for place in path.parent.glob(".*.part") if pattern.fullmatch(place.name)]
    return sorted(found, key=lambda place: place.lstat().st_mtime_ns, reverse=True)


def _rotate(path: Path, keep: int) -> None:
    for age in range(keep - 2, 0, -1):
        if earlier(path, age).exists():
            earlier(path, age).replace(earlier(path, age + 1))
    if keep < 2 or not path.exists():
        return
    second = path.with_name(f".{path.name}.link.part")
    try:
        second.unlink(missing_ok=True)
        second.hardlink_to(path)  # a second name: at no moment is there no file `path`
        second.replace(earlier(path, 1))
    except OSError:  # a file system without links; killed behind this, the new file is among `left_overs`, complete
        path.replace(earlier(path, 1))


@contextmanager
def _full_disk_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        kept = "No part of it was left behind"
        if path.exists():
            kept = f"The file from before ({_size(path.stat().st_size)}) is as it was"
        raise DiskFullError(
            f"No space is left to write {path}: {_size(free)} are free in {path.parent}, or your quota is used up. "
            f"{kept}. Make space there and start again, or choose a folder on another disk."
        ) from error


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _is_full(error: BaseException | None) -> bool:
    """Whether a full disk (or a used-up quota) is behind it: compiled writers only say so in the text or the chain."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(f"os error {code}" in str(error) for code in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


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
