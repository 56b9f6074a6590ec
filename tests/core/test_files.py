"""Files that are the old version or the new one, never half of it."""

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from credo.core.support.files import finite, write_atomically, write_json, write_text


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_writes_a_new_file_in_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.txt"
    write_text(path, "häß\n")
    assert path.read_bytes() == "häß\n".encode()
    assert names(path.parent) == ["file.txt"]


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_new_file_has_the_permissions_that_the_umask_allows(umask: int, tmp_path: Path) -> None:
    write_text(tmp_path / "file.txt", "text")
    assert mode(tmp_path / "file.txt") == 0o666 & ~umask


@pytest.mark.parametrize("old", [0o600, 0o640, 0o444, 0o664], ids=oct)
def test_a_replaced_file_keeps_its_permissions(old: int, umask: int, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    path.chmod(old)
    write_text(path, "new")
    assert (path.read_text(), mode(path)) == ("new", old)


def test_a_private_file_is_private_while_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    path.chmod(0o600)
    seen: list[int] = []
    write_atomically(path, lambda temporary: seen.append(mode(temporary)))
    assert seen == [0o600]


def test_replaces_an_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old, and longer than the new one")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert names(tmp_path) == ["file.txt"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), SystemExit(1), ValueError("bad")])
@pytest.mark.parametrize("old", [None, b"old"])
def test_a_failing_writer_leaves_the_old_file_and_nothing_else(
    error: BaseException, old: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "file.bin"
    if old is not None:
        path.write_bytes(old)

    def write(temporary: Path) -> None:
        temporary.write_bytes(b"half of the new")
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, write)
    assert names(tmp_path) == ([] if old is None else ["file.bin"])
    assert old is None or path.read_bytes() == old


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")

    def write(temporary: Path) -> None:
        assert temporary.parent == path.parent  # a rename is atomic within a file system only
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"

    write_atomically(path, write)
    assert path.read_bytes() == b"new"


def test_whoever_reads_the_old_file_reads_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with path.open() as reader:
        write_text(path, "new")
        assert reader.read() == "old"
    assert path.read_text() == "new"


def test_a_writer_may_replace_its_temporary_file(tmp_path: Path) -> None:
    """Some libraries do not open the file they are given but make a new one of that name."""

    def write(temporary: Path) -> None:
        temporary.unlink()
        temporary.write_bytes(b"made anew")

    write_atomically(tmp_path / "file.bin", write)
    assert (tmp_path / "file.bin").read_bytes() == b"made anew"
    assert names(tmp_path) == ["file.bin"]


def test_a_failing_rename_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_text(tmp_path / "taken", "text")
    assert names(tmp_path) == ["taken"]


def test_json_without_words_that_json_has_not(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, math.nan], "b": {"c": math.inf, "d": -math.inf}, "e": (True, None, "ü")}
    write_json(tmp_path / "v.json", value)
    read = json.loads((tmp_path / "v.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert read == {"a": [1, 2.5, None], "b": {"c": None, "d": None}, "e": [True, None, "ü"]}


def test_json_that_cannot_be_written_keeps_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "v.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "v.json", {"a": object()})
    assert json.loads((tmp_path / "v.json").read_text()) == {"a": 1}


def test_finite_leaves_its_argument_alone() -> None:
    value = {"a": [math.nan, 0.0, 1e308, -5e-324], "b": 3}
    assert finite(value) == {"a": [None, 0.0, 1e308, -5e-324], "b": 3}
    assert math.isnan(value["a"][0])
