"""Atomic writes: a file is either the old version or the new one."""

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
    """The disk is full; existing files are unchanged."""


def write_atomically(path: Path, write: Callable[[Path], None], *, keep: int = 1) -> None:
    """Write to a temporary file beside `path`, sync it to disk, then rename it to `path`.

    A new file gets the permissions that the umask allows, a replaced one keeps its own.

    Args:
        path: The file to write.
        write: Called with the path of the temporary file.
        keep: Number of versions: above 1, the old file becomes `earlier(path, 1)`, that one `earlier(path, 2)`, …

    Raises:
        DiskFullError: If there is no space; existing files are unchanged.
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
    """Create the empty file, private if it is to replace another; return the permissions it should end with."""
    old = stat.S_IMODE(like.stat().st_mode) if like.is_file() else None
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if old is None else 0o600)
    try:
        return stat.S_IMODE(os.fstat(handle).st_mode) if old is None else old
    finally:
        os.close(handle)


def require_file(path: Path) -> None:
    """Raise FileNotFoundError if `path` does not exist, FileFormatError if it is a folder, pipe or device.

    Reading a pipe without a writer would block, and some devices never end.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}.")
    if not path.is_file():
        raise FileFormatError(f"{path} is a {kind_of(path)}, not a regular file: give the path of a file.")


def kind_of(path: Path) -> str:
    """Describe what is at a path that is not a regular file."""
    return "folder" if path.is_dir() else "pipe" if path.is_fifo() else "device or socket"


def cache_home() -> Path:
    """Return the user's cache directory: `$XDG_CACHE_HOME` if absolute (as XDG demands), else `~/.cache`."""
    given = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return given if given.is_absolute() else Path("~/.cache").expanduser()


def earlier(path: Path, age: int) -> Path:
    """Return the path of the version before the current one (`age` 1) or an older one: checkpoint.1.pt."""
    return path.with_name(f"{path.stem}.{age}{path.suffix}") if age else path


def left_overs(path: Path) -> list[Path]:
    """Return the temporary files that killed writers of `path` left behind, newest first."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.([a-z0-9_]{{8}}|link)\.part")
    found = [file for file in path.parent.glob(".*.part") if pattern.fullmatch(file.name)]
    return sorted(found, key=lambda file: file.lstat().st_mtime_ns, reverse=True)


def _rotate(path: Path, keep: int) -> None:
    for age in range(keep - 2, 0, -1):
        if earlier(path, age).exists():
            earlier(path, age).replace(earlier(path, age + 1))
    if keep < 2 or not path.exists():
        return
    second = path.with_name(f".{path.name}.link.part")
    try:
        second.unlink(missing_ok=True)
        second.hardlink_to(path)  # a second name, so that `path` exists at every moment
        second.replace(earlier(path, 1))
    except OSError:  # no hard links on this file system; if killed after this, `left_overs` has the new file
        path.replace(earlier(path, 1))


@contextmanager
def _full_disk_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # raised again; compiled writers have types of their own for a full disk
        if not _is_full(error):
            raise
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        old = "No part of it was left behind"
        if path.exists():
            old = f"The old file ({_size(path.stat().st_size)}) is unchanged"
        raise DiskFullError(
            f"No space is left to write {path}: {_size(free)} are free in {path.parent}, or your quota is used up. "
            f"{old}. Free some space and start again, or choose a folder on another disk."
        ) from error


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _is_full(error: BaseException | None) -> bool:
    """Return whether the cause is a full disk or quota; compiled writers state it only in the text or the chain."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(f"os error {code}" in str(error) for code in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def folder_for(path: Path, *, left_over: str = "") -> Iterator[None]:
    """Create the folder; on an exception inside, remove the folders created for it if they are empty.

    A file named `left_over` is removed, too, if it is the only one.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if made and [file.name for file in path.iterdir()] == [left_over]:
            (path / left_over).unlink()
        for folder in made:
            with suppress(OSError):  # not empty
                folder.rmdir()
        raise


def write_text(path: Path, text: str) -> None:
    """Write text atomically."""
    write_atomically(path, lambda temporary: _write(temporary, text))


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically; NaN and infinities become null."""
    write_text(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """Return the value with NaN and infinities, which JSON cannot represent, replaced by None."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
