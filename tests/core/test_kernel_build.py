"""Compiling on first use: where it works, where it must not, and that it never fails loudly."""

import os
import shutil
import stat
import threading
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
    assert build.library("flat") is not None
    shutil.rmtree(next(tmp_path.glob("credo-kernels-*")))


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
