"""The table of the records, in Markdown."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

CLASSES = ("moons", "iris", "wine", "digits")
REGRESSIONS = ("gap", "diabetes")


def table(folder: Path) -> str:
    """Means over seeds: of classification, then of regression; calibrated values after an arrow.

    Args:
        folder: Where the records are.
    """
    found = {path.stem: json.loads(path.read_text(encoding="utf-8"))["numbers"] for path in folder.glob("*.json")}
    parts = [_classes(found), _regressions(found)]
    return "\n\n".join(part for part in parts if part)


def by_contender(rows: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The records of all seeds, by contender."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for key, row in rows.items():
        groups[key.rpartition(", seed ")[0]].append(row)
    return groups


def _classes(found: dict[str, Any]) -> str:
    tasks = [name for name in CLASSES if name in found]
    if not tasks:
        return ""
    lines = ["| method | " + " | ".join(f"{name}: top-1, TV" for name in tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
    groups = {name: by_contender(found[name]) for name in tasks}
    for contender in dict.fromkeys(one for name in tasks for one in groups[name]):
        cells = []
        for name in tasks:
            rows = groups[name].get(contender, [])
            cells.append(f"{_text(rows, 'top1')}, {_text(rows, 'tv', 3)}" if rows else "")
        lines.append(f"| {contender} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _regressions(found: dict[str, Any]) -> str:
    tasks = [name for name in REGRESSIONS if name in found]
    if not tasks:
        return ""
    head = [f"{name}: W1, std ratio, 90 % coverage" for name in tasks]
    lines = ["| method | gap ratio | " + " | ".join(head) + " |", "|---" * (len(tasks) + 2) + "|"]
    groups = {name: by_contender(found[name]) for name in tasks}
    for contender in dict.fromkeys(one for name in tasks for one in groups[name]):
        cells = [_text(groups["gap"].get(contender, []), "gap_ratio", 1) if "gap" in groups else ""]
        for name in tasks:
            rows = groups[name].get(contender, [])
            three = (_text(rows, "w1", 3), _text(rows, "std_ratio"), _text(rows, "coverage90"))
            cells.append(", ".join(three) if rows else "")
        lines.append(f"| {contender} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _text(rows: list[dict[str, Any]], key: str, digits: int = 2) -> str:
    """Mean over seeds; with that after calibration, where it differs."""
    plain = _mean(rows, key)
    later = _mean([row["calibrated"] for row in rows if "calibrated" in row], key)
    if plain is None:
        return "–"
    text = f"{plain:.{digits}f}"
    after = text if later is None else f"{later:.{digits}f}"
    return text if after == text else f"{text} → {after}"


def _mean(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row.get(key) for row in rows]
    numbers = [value["value"] if isinstance(value, dict) else value for value in values]
    usable = [number for number in numbers if number is not None]
    return fmean(usable) if usable else None
