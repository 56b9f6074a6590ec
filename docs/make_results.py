"""Write the tables of docs/results.md from the records in results/.

`python docs/make_results.py` replaces what stands between the markers `<!-- table: NAME -->` and `<!-- end -->`, where
NAME is the path in results/ of a table that `credo reproduce` wrote.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def markdown(columns: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; the first column is text, the others are right-aligned."""
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join("–" if cell is None else str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def reproduced(path: Path) -> str:
    """A table that `credo reproduce` wrote, with its notes."""
    table = json.loads(path.read_text(encoding="utf-8"))
    return "\n".join([markdown(table["columns"], table["rows"]), "", *(f"- {note}" for note in table["notes"])])


def fill(page: Path) -> None:
    """Replace every marked table of a page."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        source = ROOT / "results" / name
        if not source.exists():  # not measured yet: what stands there stays
            return match.group(0)
        return f"<!-- table: {name} -->\n\n{reproduced(source)}\n\n<!-- end -->"

    text = page.read_text(encoding="utf-8")
    page.write_text(re.sub(r"<!-- table: (\S+) -->.*?<!-- end -->", replace, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    fill(ROOT / "docs" / "results.md")
