"""Write TOML (the standard library only reads it) and parse `key=value`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

from credo.core.support.json_files import too_deep

# Real settings have three or four: method.of.noise.kind.
_MOST_KEYS = 20


def dump_toml(tables: Mapping[str, Any]) -> str:
    """Write nested dicts of numbers, strings, booleans and lists as TOML; None values are omitted."""
    lines: list[str] = []
    _table(tables, "", lines)
    return "\n".join(lines).strip() + "\n"


def _table(table: Mapping[str, Any], path: str, lines: list[str]) -> None:
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping) and v is not None}
    nested = {k: v for k, v in table.items() if isinstance(v, Mapping)}
    if path and (plain or not nested):
        lines.append(f"\n[{path}]")
    lines.extend(f"{_key(key)} = {toml_value(value)}" for key, value in plain.items())
    for key, value in nested.items():
        _table(value, f"{path}.{_key(key)}" if path else _key(key), lines)


def _key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() and key.isascii() else _text(key)


def toml_value(value: Any) -> str:
    """One value as TOML; raises ValueError for a list that holds None."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(entry) for entry in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items() if v is not None) + "}"
    if value is None:
        raise ValueError("TOML has no null, so a list cannot hold None.")
    return _text(str(value))


def _text(text: str) -> str:
    # JSON's escapes are valid TOML except surrogate pairs (not written here) and the unescaped control character 0x7f.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_assignment(text: str) -> tuple[list[str], Any]:
    """Parse `method.lr=0.01` into keys and value; a value that is not TOML is text."""
    key, sign, raw = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not sign or not all(path):
        raise ValueError(f"{text!r} is not key=value; write for instance method.lr=0.01.")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    except RecursionError:
        value = None
    if value is None or too_deep(value) or len(path) > _MOST_KEYS:
        raise ValueError(f"{text[:40]!r}… is nested too deeply.")
    return path, value
