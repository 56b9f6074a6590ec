"""The sdist and the wheel: the same bytes of the same files, and every file of the package inside."""

import importlib.util
import io
import sys
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "credo"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_build", ROOT / "release" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def archive(files: list[tuple[str, bytes]], *, time: int, owner: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uname = len(content), time, owner
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


def test_an_sdist_has_the_same_bytes_on_any_day_and_machine(release: ModuleType) -> None:
    files = [("credo/b.py", b"b = 1\n"), ("credo/a.py", b"a = 1\n")]
    first, second = archive(files, time=10, owner="me"), archive(files[::-1], time=99, owner="you")
    assert first != second
    assert release.repacked(first, 1000) == release.repacked(second, 1000)
    with tarfile.open(fileobj=io.BytesIO(release.repacked(first, 1000))) as tar:
        assert [(one.name, one.mtime, one.uname) for one in tar] == [("credo/a.py", 1000, ""), ("credo/b.py", 1000, "")]
        file = tar.extractfile("credo/a.py")
        assert file is not None
        assert file.read() == b"a = 1\n"


def test_other_contents_give_other_bytes(release: ModuleType) -> None:
    one, other = (archive([("a", text)], time=1, owner="me") for text in (b"1", b"2"))
    assert release.repacked(one, 1000) != release.repacked(other, 1000)


def test_the_wheel_has_every_file_of_the_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    packed = {
        path
        for package, patterns in data.items()
        for pattern in patterns
        for path in (ROOT / "src" / package.replace(".", "/")).glob(pattern)
    }
    here = {path for path in SOURCE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert sorted(here - packed) == []
    without = {path.parent for path in SOURCE.rglob("*.py")} - {path.parent for path in SOURCE.rglob("__init__.py")}
    assert sorted(without) == [], "a folder without __init__.py is left out of the wheel"


def test_the_classifiers_claim_this_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"Programming Language :: Python :: 3.{sys.version_info.minor}" in project["classifiers"]
