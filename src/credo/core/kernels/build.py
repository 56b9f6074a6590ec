"""Compile the C++ sources beside this file on first use; without a compiler there is simply no library.

`CREDO_KERNELS=0` turns compiled code off. Libraries are kept in the user's cache, named by source, flags, compiler and
processor, so that another machine with the same home directory builds its own. Beside each is its SHA-256: one that was
truncated or changed is built again.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

from credo.core.support.files import cache_home

_FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-pthread")
# Left out one after another where a compiler does not know them.
_OPTIONAL = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-fopenmp",),
    (),
)
_SECONDS = 120

_lock = threading.Lock()
_loaded: dict[str, ctypes.CDLL | None] = {}
_used: dict[str, bool] = {}


def library(name: str) -> ctypes.CDLL | None:
    """The compiled `name`.cpp, built if need be; None where compiled code is off or impossible."""
    if enabled() and name not in _loaded:
        with _lock:
            if name not in _loaded:
                _loaded[name] = _open(Path(__file__).with_name(f"{name}.cpp"))
    found = _loaded[name] if enabled() else None
    _used[name] = found is not None
    return found


def used() -> dict[str, bool]:
    """The libraries that were asked for in this process, and whether they were there the last time."""
    return dict(_used)


def why_torch() -> str:
    """Why compiled code is not used, where it is not."""
    if not enabled():
        return f"CREDO_KERNELS={os.environ['CREDO_KERNELS']} is set"
    return "no C++ compiler was found" if _compiler() is None else "they could not be built or loaded here"


def enabled() -> bool:
    """Whether compiled code may be used; read at each call, so that one process can compare both paths."""
    return os.environ.get("CREDO_KERNELS", "1") not in ("0", "off", "false")


def _open(source: Path) -> ctypes.CDLL | None:
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        folder = _folder()
        path = folder / f"{source.stem}-{_fingerprint(source, compiler)}.so"
        if not _is_whole(path) and not _compile(compiler, source, path):
            return None
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None


def _is_whole(path: Path) -> bool:
    """Whether the library is this user's own and, to the bit, what the compiler wrote."""
    proof = _proof(path)
    if not all(place.exists() and _is_own(place) for place in (path, proof)):
        return False
    return proof.read_bytes() == _digest(path)


def _proof(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def _compiler() -> str | None:
    for candidate in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        found = shutil.which(candidate) if candidate else None
        if found:
            return found
    return None


def _folder() -> Path:
    """A folder of the user's own: code is loaded from it, so it must not be one that others can write to."""
    try:
        folder = cache_home() / "credo" / "kernels"
        for place in (
            folder.parent.parent,
            folder.parent,
            folder,
        ):  # each: `parents` are made with all that umask allows
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK) and _is_own(folder) and _is_beyond_reach(folder):
            return folder
    except (OSError, RuntimeError):  # the second where there is no home
        pass
    return _temporary_folder()


def _is_own(path: Path) -> bool:
    """Whether the path is this user's and nobody else may write to it; no, where a system cannot tell (Windows)."""
    user = getattr(os, "getuid", None)
    if user is None:
        return False
    status = path.stat()
    return status.st_uid == user() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_beyond_reach(folder: Path) -> bool:
    """Whether no other user could put another folder in its place: whoever can write to a parent can rename it."""
    parents = {*folder.parents, *folder.resolve().parents}
    return all(_is_guarded(parent.stat()) for parent in parents)


def _is_guarded(status: os.stat_result) -> bool:
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid in (0, os.getuid()) and (not others or bool(status.st_mode & stat.S_ISVTX))


@cache
def _temporary_folder() -> Path:
    """A private folder for as long as this process runs."""
    folder = tempfile.mkdtemp(prefix="credo-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _fingerprint(source: Path, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_SECONDS, check=False).stdout
    parts = (source.read_bytes(), repr((_FLAGS, _OPTIONAL)).encode(), version, _processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, source: Path, target: Path) -> bool:
    """Build beside the target and rename, so that nobody ever loads half a library."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        for optional in _OPTIONAL:
            command = [compiler, *_FLAGS, *optional, str(source), "-o", str(part)]
            done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
            if done.returncode == 0:
                digest = _digest(part)
                _install(part, target)
                part.write_bytes(digest)
                _install(part, _proof(target))
                return True
        return False
    except subprocess.TimeoutExpired:
        return False
    finally:
        part.unlink(missing_ok=True)


def _install(part: Path, target: Path) -> None:
    """Rename what is complete, once it is on disk: a machine that loses power would leave an empty file."""
    part.chmod(0o700)  # a generous umask would let others change it
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(target)
