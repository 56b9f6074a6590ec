"""Make the result tables in results/ from the records beside them, and write them into the pages.

`python docs/make_results.py`, after a reproduction has put new records into results/. In a page, the text between the
markers `<!-- table: NAME -->` and `<!-- end -->` is replaced; NAME is the path in results/ of a result table, or
PATH#KEY for one of the tables in the record of a benchmark. `<!-- commands: STUDY/SCALE/TABLE -->` stands for the
commands that train the networks of a table.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAMES = (
    "results.md",
    "benchmarks.md",
    "which-method.md",
    "defaults-measured.md",
    "calibration.md",
    "answers-you-can-rely-on.md",
    "trained-network.md",
    "laplace.md",
    "out-of-distribution.md",
    "fidelity.md",
    "samplers.md",
    "hybrid-flow.md",
    "lora.md",
    "support.md",
    "auto.md",
    "auto-measured.md",
)
# Records of steps from before records had tables.
STEPS = ("step_cost.json", "step_cost_resnet18_all.json", "step_cost_without_kernels.json")
PAGES = (
    *(ROOT / "docs" / name for name in NAMES),
    *sorted((ROOT / "reproductions").glob("*/README.md")),
)


def markdown(columns: list[str], rows: list[list[Any]]) -> str:
    """Format a Markdown table; the first column is text, the others are right-aligned."""
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join("–" if cell is None else str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def stored(path: Path, key: str) -> str:
    """Format a table of a record with its notes.

    Args:
        path: The record.
        key: The table's key if the record has several, else empty.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    table = record["tables"][key] if key else record
    notes = [f"- {note}" for note in table["notes"]]
    return "\n".join([markdown(table["columns"], table["rows"]), *(["", *notes] if notes else [])])


def filled(text: str) -> str:
    """Return a page's text with every marked table replaced."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        file, _, key = name.partition("#")
        source = ROOT / "results" / file
        if not source.exists():  # not measured yet: leave the text as it is
            return match.group(0)
        return f"<!-- table: {name} -->\n\n{stored(source, key)}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\S+) -->.*?<!-- end -->", replace, text, flags=re.DOTALL)


def with_commands(text: str) -> str:
    """Return a page's text with the commands that train the networks of its tables."""
    sys.path.insert(0, str(ROOT))
    from reproductions.studies import STUDIES
    from reproductions.study import table_commands

    def replace(match: re.Match[str]) -> str:
        name, scale, key = match.group(1).split("/")
        commands = table_commands(STUDIES[name], name, key, ROOT / "results" / name / scale, scale)
        return f"<!-- commands: {match.group(1)} -->\n\n{commands}\n\n<!-- end -->"

    return re.sub(r"<!-- commands: (\S+) -->.*?<!-- end -->", replace, text, flags=re.DOTALL)


def remake_tables() -> None:
    """Make every result table in results/ again from the records beside it."""
    sys.path.insert(0, str(ROOT))
    from reproductions.studies import STUDIES
    from reproductions.study import SCALES, finish_table, table_file

    for name, study in STUDIES.items():
        for folder in (ROOT / "results" / name / scale for scale in SCALES):
            for key, table in study.tables.items():
                if (folder / table_file(key)).exists():
                    finish_table(table, key, folder, folder.name)


if __name__ == "__main__":
    remake_tables()
    from benchmarks.after_training_table import write_tables

    write_tables(ROOT / "results/benchmarks/after-training")
    from benchmarks.fidelity.table import write_tables as write_fidelity

    write_fidelity(ROOT / "results/benchmarks/fidelity")
    from benchmarks.cyclical import write_table

    if (ROOT / "results/benchmarks/cyclical").exists():
        write_table(ROOT / "results/benchmarks/cyclical")
    from benchmarks.lora.table import write_tables as write_lora

    write_lora(ROOT / "results/benchmarks/lora")
    from benchmarks import predict_cost, step_cost
    from benchmarks.report import write_tables as write_record

    for name in STEPS:
        write_record(ROOT / "results/benchmarks" / name, lambda record: step_cost.result_tables(record["numbers"]))
    write_record(
        ROOT / "results/benchmarks/predict_cost.json", lambda record: predict_cost.result_tables(record["numbers"])
    )
    from tests.contract.support import write_tables as write_support

    write_support(ROOT / "results/support")
    for page in PAGES:
        page.write_text(with_commands(filled(page.read_text(encoding="utf-8"))), encoding="utf-8")
