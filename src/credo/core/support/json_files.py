"""Read JSON, JSON lines and TOML; every error names the file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from credo.core.errors import FileFormatError
from credo.core.support.files import require_file

Kinds = Mapping[str, type | tuple[type, ...]]
# Far above any valid record; much deeper ones exhaust Python's stack.
_DEEPEST = 50


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file."""
    require_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} is not a text file in UTF-8: {error}.") from error


def read_json(path: Path, needs: Kinds | None = None) -> dict[str, Any]:
    """Return the object in a JSON file; `needs` maps required keys to the types of their values."""
    return _object(path, read_text(path), needs, f"{path}")


def read_json_lines(path: Path, needs: Kinds | None = None) -> list[dict[str, Any]]:
    """Return the objects in a file with one per line; blank lines are skipped."""
    lines = read_text(path).split("\n")
    return [_object(path, line, needs, f"{path}, line {i}") for i, line in enumerate(lines, start=1) if line.strip()]


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file."""
    tables: dict[str, Any] = _parsed(path, read_text(path), tomllib.loads, "TOML", f"{path}")
    return tables


def too_deep(value: Any) -> bool:
    """Return whether lists and tables are nested deeper than in any valid record."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
    return bool(level)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []


def _object(path: Path, text: str, needs: Kinds | None, where: str) -> dict[str, Any]:
    found = _parsed(path, text, json.loads, "JSON", where)
    if not isinstance(found, dict):
        raise FileFormatError(f"{where} holds no JSON object but {text.strip()[:40]}. {_advice(path)}")
    for key, kind in (needs or {}).items():
        if key not in found:
            raise FileFormatError(f"{where} has no {key!r}. {_advice(path)}")
        if not isinstance(found[key], kind):
            raise FileFormatError(f"{where}: {key!r} cannot be {str(found[key])[:40]!r}. {_advice(path)}")
    return found


def _parsed(path: Path, text: str, parse: Callable[[str], Any], language: str, where: str) -> Any:
    try:
        found = parse(text)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{where} is not valid {language} ({error}). {_advice(path)}") from error
    if too_deep(found):
        raise FileFormatError(f"{where} is nested more than {_DEEPEST} deep. {_advice(path)}")
    return found


def _advice(path: Path) -> str:
    return f"Repair {path.name}, or delete it and make it again."
