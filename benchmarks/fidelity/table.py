"""The tables of the records, one for each task, as docs/make_results.py writes them into the page."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from credo.core.support.files import write_json

TABLE = "table.json"
CLASSES = ("moons", "iris", "wine", "digits")
REGRESSIONS = ("gap", "diabetes")
# Columns of a task: title, key of a record (in another record where there is a point), digits.
OF_CLASSES = (
    ("top-1", "top1", 2),
    ("TV", "tv", 3),
    ("std ratio", "std_ratio", 2),
    ("NLL", "nll", 3),
    ("ECE", "ece", 3),
)
OF_REGRESSIONS = (
    ("W1", "w1", 3),
    ("W1 in the hole", "between.w1", 2),
    ("std ratio", "std_ratio", 2),
    ("gap ratio", "gap_ratio", 1),
    ("coverage", "coverage90", 2),
    ("NLL", "nll", 2),
)
COST = "cost"
NOTES = [
    "After an arrow the same after `credo.calibrate`, where it differs. HMC's own row compares two samples of its "
    "draws, which no posterior can be nearer than.",
    "Top-1: inputs with the same label as HMC's. TV: total variation of the averaged probabilities. W1: Wasserstein-1 "
    "distance of the function values. Std ratio: standard deviation over draws relative to HMC's. Gap ratio: that in "
    "the hole over that on data. Coverage: of 90 % intervals. Cost: processor time of training, MAP's is 1; of HMC, "
    "that of its chains.",
]


def write_tables(folder: Path) -> None:
    """Make the tables of the records in a folder, beside them.

    Args:
        folder: Where the records are.
    """
    write_json(folder / TABLE, make_tables(folder))


def make_tables(folder: Path) -> dict[str, Any]:
    """{"tables": …} by name: one for each task, and `chains`, the convergence of the reference.

    Args:
        folder: Where the records are.
    """
    paths = [path for path in sorted(folder.glob("*.json")) if path.name != TABLE]
    found = {path.stem: by_contender(json.loads(path.read_text(encoding="utf-8"))["numbers"]) for path in paths}
    tables = {
        **{task: _table(found[task], OF_REGRESSIONS) for task in REGRESSIONS if task in found},
        **{task: _table(found[task], OF_CLASSES) for task in CLASSES if task in found},
    }
    return {"tables": {**tables, "chains": _chains(found)}}


def by_contender(rows: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The records of all seeds, by contender."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for key, row in rows.items():
        groups[key.rpartition(", seed ")[0]].append(row)
    return groups


def _table(found: dict[str, Any], measures: tuple[tuple[str, str, int], ...]) -> dict[str, Any]:
    """Means over the seeds of one task."""
    kept = [each for each in measures if any(_mean(rows, each[1]) is not None for rows in found.values())]
    unit = _mean(found.get("MAP", []), "seconds")
    rows = []
    for contender, records in found.items():
        seconds = _mean(records, "seconds")
        cost = None if unit is None or seconds is None else f"{seconds / unit:.1f}"
        rows.append([contender, len(records), *(_text(records, key, digits) for _, key, digits in kept), cost])
    return {"columns": ["method", "seeds", *(title for title, *_ in kept), COST], "rows": rows, "notes": NOTES}


def _chains(found: dict[str, Any]) -> dict[str, Any]:
    """Convergence of HMC: the worst of all seeds."""
    rows: list[list[Any]] = []
    for task in (*REGRESSIONS, *CLASSES):
        records = found.get(task, {}).get("HMC", [])
        studies = [record[key] for record in records for key in ("chains", "chains_between") if record.get(key)]
        if not studies:
            continue
        worst = max(study["rhat"] for study in studies)
        least = min(min(study["ess_bulk"], study["ess_tail"]) for study in studies)
        gradients, divergences = (sum(record["run"][key] for record in records) for key in ("gradients", "divergences"))
        seconds = [record["seconds"] for record in records if record["seconds"] is not None]
        cost = [f"{gradients / len(records):,.0f}", f"{fmean(seconds):.0f}" if seconds else None]
        rows.append(
            [task, len(records), studies[0]["chains"], f"{worst:.3f}", f"{least:.0f}", f"{divergences:.0f}", *cost]
        )
    columns = ["task", "seeds", "chains", "largest R̂", "smallest ESS", "divergences", "gradients", "processor seconds"]
    return {"columns": columns, "rows": rows, "notes": []}


def _text(rows: list[dict[str, Any]], key: str, digits: int) -> str | None:
    """Mean over seeds; with that after calibration, where it differs."""
    plain = _mean(rows, key)
    later = _mean([row["calibrated"] for row in rows if "calibrated" in row], key)
    if plain is None:
        return None
    text = f"{plain:.{digits}f}"
    after = text if later is None else f"{later:.{digits}f}"
    return text if after == text else f"{text} → {after}"


def _mean(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [_at(row, key) for row in rows]
    numbers = [value["value"] if isinstance(value, dict) else value for value in values]
    usable = [number for number in numbers if number is not None]
    return fmean(usable) if usable else None


def _at(row: dict[str, Any], key: str) -> Any:
    outer, _, inner = key.partition(".")
    return row.get(outer, {}).get(inner) if inner else row.get(outer)
