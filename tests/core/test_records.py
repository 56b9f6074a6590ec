"""Records that are read back: whatever is wrong with one, the error names the file."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from credo.core.errors import FileFormatError
from credo.core.support.json_files import read_json, read_json_lines, read_text, read_toml

Reader = Callable[[Path], Any]
NEEDS = {"test": dict, "seconds": (int, float)}


def needing(path: Path) -> dict[str, Any]:
    return read_json(path, NEEDS)


def lines_needing(path: Path) -> list[dict[str, Any]]:
    return read_json_lines(path, NEEDS)


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_text, b"\xff\xfe\x00", r"record is not a text file in UTF-8"),
        (read_json, b"\x80", r"record is not a text file in UTF-8"),
        (read_json, b"{", r"record is not valid JSON \(Expecting.*Repair record, or delete it"),
        (read_json, b"", r"record is not valid JSON"),
        (read_json, b"[" * 100_000, r"record is not valid JSON \(maximum recursion"),
        (read_json, b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}", r"record is nested more than 50 deep"),
        (read_json, b"[1, 2]", r"record holds no JSON object but \[1, 2\]"),
        (needing, b"{}", r"record has no 'test'"),
        (needing, b'{"test": {}, "seconds": "x"}', r"record: 'seconds' cannot be 'x'"),
        (read_json_lines, b'{"a": 1}\n\n{"a"', r"record, line 3 is not valid JSON"),
        (lines_needing, b'{"test": {}, "seconds": 1}\n{"test": 3}', r"record, line 2: 'test' cannot be '3'"),
        (read_toml, b"a = ", r"record is not valid TOML \(Invalid value"),
        (read_toml, b"a = " + b"[" * 5000 + b"]" * 5000, r"record is not valid TOML \(maximum recursion"),
        (read_toml, b".".join([b"a"] * 60) + b" = 1", r"record is nested more than 50 deep"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:30]),
)
def test_the_error_names_the_file(read: Reader, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "record").write_bytes(content)
    with pytest.raises(FileFormatError, match=message):
        read(tmp_path / "record")


@pytest.mark.parametrize("read", [read_text, read_json, read_json_lines, read_toml])
def test_what_is_no_file_is_not_opened(read: Reader, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileFormatError, match="pipe is a pipe"):
        read(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError, match=r"There is no file .*nothing"):
        read(tmp_path / "nothing")


def test_whole_records_are_read(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_text('{"test": {"é": null}, "seconds": 2}\n\n')
    assert needing(path) == {"test": {"é": None}, "seconds": 2}
    assert lines_needing(path) == [needing(path)]
    path.write_text('a.b = "é"\nc = [[1], [2]]')
    assert read_toml(path) == {"a": {"b": "é"}, "c": [[1], [2]]}
