"""Compile the C++ sources in `cpp` on first use; without a compiler, callers fall back to PyTorch.

`CREDO_KERNELS=0` disables compiled code. Libraries are cached in the user's cache directory under a hash of source,
flags, compiler and processor, so machines that share a home directory each build their own. A SHA-256 file next to each
library detects truncated or modified ones, which are rebuilt.
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
# Tried in this order until the compiler accepts one.
_OPTIONAL = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-fopenmp",),
    (),
)
_SECONDS = 120
_SOURCES = Path(__file__).with_name("cpp")

_lock = threading.Lock()
_loaded: dict[str, ctypes.CDLL | None] = {}
_used: dict[str, bool] = {}


def library(name: str) -> ctypes.CDLL | None:
    """The library compiled from `name`.cpp, built if necessary; None if compiled code is disabled or unavailable."""
    if enabled() and name not in _loaded:
        with _lock:
            if name not in _loaded:
                _loaded[name] = _open(_SOURCES / f"{name}.cpp")
    found = _loaded[name] if enabled() else None
    _used[name] = found is not None
    return found


def used() -> dict[str, bool]:
    """Libraries requested in this process, and whether each was available at the last request."""
    return dict(_used)


def why_torch() -> str:
    """Reason why the PyTorch fallback is used."""
    if not enabled():
        return f"CREDO_KERNELS={os.environ['CREDO_KERNELS']} is set"
    return "no C++ compiler was found" if _compiler() is None else "they could not be built or loaded here"


def enabled() -> bool:
    """Whether `CREDO_KERNELS` allows compiled code; read at every call, so that a process can compare both paths."""
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
    """Whether the library belongs to this user and matches its digest."""
    proof = _proof(path)
    if not all(file.exists() and _is_own(file) for file in (path, proof)):
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
    """A folder that only this user can write to, since code is loaded from it."""
    try:
        folder = cache_home() / "credo" / "kernels"
        for each in (folder.parent.parent, folder.parent, folder):  # `parents=True` alone ignores `mode` for parents
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK) and _is_own(folder) and _is_beyond_reach(folder):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        pass
    return _temporary_folder()


def _is_own(path: Path) -> bool:
    """Whether only this user can write to the path; False where the system cannot tell (Windows)."""
    user = getattr(os, "getuid", None)
    if user is None:
        return False
    status = path.stat()
    return status.st_uid == user() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_beyond_reach(folder: Path) -> bool:
    """Whether no other user can replace the folder, by renaming it in a parent that they can write to."""
    parents = {*folder.parents, *folder.resolve().parents}
    return all(_is_guarded(parent.stat()) for parent in parents)


def _is_guarded(status: os.stat_result) -> bool:
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid in (0, os.getuid()) and (not others or bool(status.st_mode & stat.S_ISVTX))


@cache
def _temporary_folder() -> Path:
    """A private folder that is deleted when this process exits."""
    folder = tempfile.mkdtemp(prefix="credo-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _fingerprint(source: Path, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_SECONDS, check=False).stdout
    parts = (source.read_bytes(), repr((_FLAGS, _OPTIONAL)).encode(), version, _processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _processor() -> str:
    """Processor features that `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, source: Path, target: Path) -> bool:
    """Build next to the target and rename, so that no process loads a partial library."""
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
    """Rename a complete file after fsync: a power failure could otherwise leave it empty."""
    part.chmod(0o700)  # a permissive umask would let others change it
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(target)
