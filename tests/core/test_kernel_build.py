"""Compiling on first use: where it works, where it must not, and that it never fails loudly."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from credo.core.kernels import build

needs_compiler = pytest.mark.skipif(build._compiler() is None, reason="no C++ compiler")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a process that has loaded nothing, with an empty cache."""
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CREDO_KERNELS", raising=False)
    return tmp_path / "credo" / "kernels"


@needs_compiler
def test_a_library_is_built_once_and_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.library("flat") is not None
    (built,) = fresh.iterdir()
    assert built.suffix == ".so"
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.library("flat") is not None


def test_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDO_KERNELS", "0")
    assert build.library("flat") is None
    assert not fresh.exists()


def test_no_compiler_is_no_error(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert build.library("flat") is None


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_a_compiler_that_fails_leaves_nothing_behind(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fresh.parent.parent / "broken-compiler"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert build.library("flat") is None
    assert list(fresh.iterdir()) == []


@needs_compiler
def test_a_compiler_that_knows_few_options_still_builds(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build._compiler()
    picky = fresh.parent.parent / "picky-compiler"
    picky.write_text(f'#!/bin/sh\ncase "$*" in *-march=native*|*-fopenmp*) exit 1;; esac\nexec {real} "$@"\n')
    picky.chmod(0o755)
    monkeypatch.setenv("CXX", str(picky))
    assert build.library("flat") is not None


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    build._temporary_folder.cache_clear()
    assert build.library("flat") is not None
    (private,) = tmp_path.glob("credo-kernels-*")
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    build._temporary_folder.cache_clear()


@pytest.fixture
def temporary(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where private folders are made, beside the cache."""
    folder = fresh.parent.parent / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    build._temporary_folder.cache_clear()
    yield folder
    build._temporary_folder.cache_clear()


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o772, 0o720])
@needs_compiler
def test_no_code_is_loaded_from_a_folder_that_others_can_write_to(
    mode: int, fresh: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(mode)
    compiler, source = build._compiler(), Path(build.__file__).with_name("flat.cpp")
    assert compiler is not None
    planted = fresh / f"flat-{build._fingerprint(source, compiler)}.so"
    planted.write_bytes(b"somebody else's")
    loaded: list[str] = []
    monkeypatch.setattr(build, "_compile", lambda compiler, source, target: target.write_bytes(b"ours") > 0)
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: loaded.append(path))
    build.library("flat")
    (private,) = temporary.iterdir()
    assert [Path(path).parent for path in loaded] == [private]
    assert planted.read_bytes() == b"somebody else's"


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
@needs_compiler
def test_a_library_that_others_can_write_to_is_built_anew(fresh: Path) -> None:
    compiler, source = build._compiler(), Path(build.__file__).with_name("flat.cpp")
    assert compiler is not None
    planted = build._folder() / f"flat-{build._fingerprint(source, compiler)}.so"
    planted.write_bytes(b"somebody else's")
    planted.chmod(0o775)
    before = os.umask(0o002)
    try:
        assert build.library("flat") is not None
    finally:
        os.umask(before)
    assert not stat.S_IMODE(planted.stat().st_mode) & 0o022


@needs_compiler
def test_a_system_without_user_numbers_gets_a_private_folder(
    fresh: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "getuid")  # as on Windows
    monkeypatch.setattr(build, "_compile", lambda compiler, source, target: target.write_bytes(b"ours") > 0)
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: path)
    assert build.library("flat") is not None
    (private,) = temporary.iterdir()
    assert [path.suffix for path in private.iterdir()] == [".so"]
    assert not fresh.exists() or list(fresh.iterdir()) == []


def test_private_folders_go_with_the_process(tmp_path: Path) -> None:
    program = "from credo.core.kernels import build; print(build._temporary_folder().is_dir())"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
    assert list(tmp_path.glob("credo-kernels-*")) == []


@needs_compiler
def test_a_damaged_library_is_no_error(fresh: Path) -> None:
    compiler, source = build._compiler(), Path(build.__file__).with_name("flat.cpp")
    assert compiler is not None
    (build._folder() / f"flat-{build._fingerprint(source, compiler)}.so").write_bytes(b"not a library")
    assert build.library("flat") is None


@needs_compiler
def test_many_threads_share_one_build(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    real = build._compile
    monkeypatch.setattr(build, "_compile", lambda *a: compiled.append(a) or real(*a))
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(build.library("flat"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    assert len(found) == 4
    assert all(f is found[0] for f in found)
