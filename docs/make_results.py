"""Write the tables of the pages from the records in results/.

`python docs/make_results.py` replaces what stands between the markers `<!-- table: NAME -->` and `<!-- end -->`, where
NAME is the path in results/ of a table that `credo reproduce` wrote, or PATH#KEY for one of the tables in the record of
a benchmark.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("results.md", "benchmarks.md", "which-method.md")


def markdown(columns: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; the first column is text, the others are right-aligned."""
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join("–" if cell is None else str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def stored(path: Path, key: str) -> str:
    """A table of a record, with its notes."""
    record = json.loads(path.read_text(encoding="utf-8"))
    table = record["tables"][key] if key else record
    notes = [f"- {note}" for note in table["notes"]]
    return "\n".join([markdown(table["columns"], table["rows"]), *(["", *notes] if notes else [])])


def fill(page: Path) -> None:
    """Replace every marked table of a page."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        file, _, key = name.partition("#")
        source = ROOT / "results" / file
        if not source.exists():  # not measured yet: what stands there stays
            return match.group(0)
        return f"<!-- table: {name} -->\n\n{stored(source, key)}\n\n<!-- end -->"

    text = page.read_text(encoding="utf-8")
    page.write_text(re.sub(r"<!-- table: (\S+) -->.*?<!-- end -->", replace, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    for name in PAGES:
        fill(ROOT / "docs" / name)
