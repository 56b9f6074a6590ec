"""Compiling on first use: where it works, where it must not, and that it never fails loudly."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from credo.core.kernels import build

needs_compiler = pytest.mark.skipif(build._compiler() is None, reason="no C++ compiler")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a process that has loaded nothing, with an empty cache."""
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_used", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CREDO_KERNELS", raising=False)
    return tmp_path / "credo" / "kernels"


@needs_compiler
def test_a_library_is_built_once_and_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.library("flat") is not None
    assert sorted(path.suffix for path in fresh.iterdir()) == [".sha256", ".so"]
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.library("flat") is not None


@needs_compiler
def test_another_source_or_processor_has_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = build._compiler()
    assert compiler is not None
    source = tmp_path / "some.cpp"
    source.write_text("int one() { return 1; }\n")
    first = build._fingerprint(source, compiler)
    assert build._fingerprint(source, compiler) == first
    found = {first}
    for change in (
        lambda: source.write_text("int one() { return 2; }\n"),
        lambda: monkeypatch.setattr(build, "_processor", lambda: "model name: another\nflags: fewer"),
        lambda: monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-O2")),
        lambda: monkeypatch.setattr(build, "_OPTIONAL", ()),
    ):
        change()
        found.add(build._fingerprint(source, compiler))
    assert len(found) == 5


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_another_compiler_has_another_file(tmp_path: Path) -> None:
    source, found = tmp_path / "some.cpp", set()
    source.write_text("int one() { return 1; }\n")
    for version in ("1.0", "1.1"):
        compiler = tmp_path / f"compiler-{version}"
        compiler.write_text(f"#!/bin/sh\necho {version}\n")
        compiler.chmod(0o755)
        found.add(build._fingerprint(source, str(compiler)))
    assert len(found) == 2


@pytest.mark.parametrize("line", ["model name\t: {}", "flags\t\t: {}", "Features\t: {}", "CPU part\t: {}"])
def test_processors_differ_by_what_native_code_depends_on(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name, speed in (("a", 1000), ("a", 2000), ("b", 1000)):
        text = f"processor\t: 0\ncpu MHz\t\t: {speed}\n{line.format(name)}\n"
        monkeypatch.setattr(Path, "read_text", lambda *_, text=text, **__: text)
        found.append(build._processor())
    assert found[0] == found[1] != found[2]


@needs_compiler
def test_a_library_of_another_processor_is_not_loaded(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home directory that two machines share holds a library for each."""
    monkeypatch.setattr(build, "_compile", lambda compiler, source, target: target.write_bytes(b"built") > 0)
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: path)
    here = build.library("flat")
    monkeypatch.setattr(build, "_processor", lambda: "model name: another")
    monkeypatch.setattr(build, "_loaded", {})
    assert build.library("flat") != here
    assert len(list(fresh.iterdir())) == 2


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
    compiler, source = build._compiler(), build._SOURCES / "flat.cpp"
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
    compiler, source = build._compiler(), build._SOURCES / "flat.cpp"
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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that takes no time: of another source, without optimisation."""

    def fast(compiler: str, source: Path, target: Path) -> bool:
        small = target.parent.parent / "small.cpp"
        small.write_text('extern "C" int seven() { return 7; }\n')
        with monkeypatch.context() as patch:
            patch.setattr(build, "_FLAGS", ("-O0", "-shared", "-fPIC"))
            patch.setattr(build, "_OPTIONAL", ((),))
            return real(compiler, small, target)

    real = build._compile
    monkeypatch.setattr(build, "_compile", fast)


def _flip(content: bytes) -> bytes:
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "junk": lambda content: b"not a library",
    "a fifth": lambda content: content[: len(content) // 5],  # mapped, the rest of it would be a bus error
    "half": lambda content: content[: len(content) // 2],
    "one bit": _flip,
}


@pytest.mark.parametrize("file", [".so", ".sha256"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.usefixtures("quick")
@needs_compiler
def test_a_damaged_library_is_built_again(damage: str, file: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.library("flat") is not None
    (path,) = fresh.glob(f"*{file}")
    whole = path.read_bytes()
    path.unlink()  # the library is in use: its own bytes must not change
    path.write_bytes(DAMAGES[damage](whole))
    path.chmod(0o700)
    monkeypatch.setattr(build, "_loaded", {})
    found = build.library("flat")
    assert found is not None
    assert found.seven() == 7
    assert path.read_bytes() == whole


@pytest.mark.usefixtures("quick")
@needs_compiler
def test_a_library_without_its_digest_is_built_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.library("flat") is not None
    (proof,) = fresh.glob("*.sha256")
    proof.unlink()
    monkeypatch.setattr(build, "_loaded", {})
    assert build.library("flat") is not None
    assert proof.exists()


@pytest.mark.usefixtures("quick")
@needs_compiler
def test_a_relative_cache_is_ignored(tmp_path: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG specification has it: else code would be loaded from whatever folder one stands in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.library("flat") is not None
    assert not (tmp_path / "cache").exists()
    assert list((tmp_path / "home" / ".cache" / "credo" / "kernels").glob("*.so"))


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
@pytest.mark.usefixtures("quick")
@needs_compiler
def test_a_cache_below_a_folder_that_others_can_write_to_is_not_used(mode: int, fresh: Path, temporary: Path) -> None:
    """Whoever can write to a parent can put a folder of another name in its place, unless it is sticky as /tmp is."""
    fresh.mkdir(parents=True, mode=0o700)
    fresh.parent.chmod(mode)
    assert build.library("flat") is not None
    assert bool(list(fresh.iterdir())) == (mode == 0o1777)
    assert bool(list(temporary.iterdir())) == (mode != 0o1777)


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_new_folders_of_the_cache_are_private_whatever_the_umask(
    tmp_path: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    before = os.umask(0)
    try:
        folder = build._folder()
    finally:
        os.umask(before)
    assert folder == tmp_path / "new" / "credo" / "kernels"
    assert {stat.S_IMODE(place.stat().st_mode) for place in (folder, folder.parent, tmp_path / "new")} == {0o700}


def test_what_was_used_is_known(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.used() == {}
    monkeypatch.setenv("CREDO_KERNELS", "0")
    build.library("flat")
    assert build.used() == {"flat": False}
    assert build.why_torch() == "CREDO_KERNELS=0 is set"
    monkeypatch.setenv("CREDO_KERNELS", "1")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert build.why_torch() == "no C++ compiler was found"


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
