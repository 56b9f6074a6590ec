"""`python -m benchmarks.ood`: rows that are there are not made again, and tables are those of the numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import ood
from pages import ROOT

from credo.detection import OodComparison
from credo.evaluate import Interval


def scores(seed: int, shift: float) -> ood.Scores:
    generator = torch.Generator().manual_seed(seed)
    sets = {"cifar10": 0.0, "cifar100": shift}
    return {name: {s: torch.randn(50, generator=generator) + m for s in ood.SCORES} for name, m in sets.items()}


def read(numbers: dict[str, Any]) -> OodComparison:
    """A comparison from its record."""
    found = {k: v if k == "reference" else {n: Interval(**i) for n, i in v.items()} for k, v in numbers.items()}
    return OodComparison(**found)


def test_rows_that_are_there_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls = []

    def run_row(task: ood.Task, row: str, kept: Path) -> tuple[ood.Scores, dict[str, float]]:
        calls.append(row)
        return scores(len(calls), 2.0 if row == "network" else 3.0), {"posterior": 1.0, "fit": 2.0}

    monkeypatch.setattr(ood, "run_row", run_row)
    for _ in range(2):
        ood.main(["--tasks", "cifar10", "--folder", str(tmp_path / "records"), "--cache", str(tmp_path / "cache")])
    assert calls == [*ood.TASKS["cifar10"].rows]
    record = json.loads((tmp_path / "records" / "cifar10.json").read_text())
    table = record["tables"]["cifar100"]
    assert table["columns"] == ["score", *calls]
    assert [row[0] for row in table["rows"]] == list(ood.SCORES)
    best = record["numbers"]["cifar100"]["reference"]
    assert best.startswith("network: ")
    differences = record["tables"]["cifar100-differences"]["rows"]
    assert [row[0] for row in differences] == calls[1:]
    assert all(row[1].startswith("+") for row in differences)  # the others were shifted further
    assert "cifar10 against cifar100" in capsys.readouterr().out
    for path in (tmp_path / "records" / "cifar10.json", *(ROOT / ood.FOLDER).glob("*.json")):  # and what is published
        check_tables(path)


def check_tables(path: Path) -> None:
    """The tables of a record are those of its numbers."""
    record = json.loads(path.read_text(encoding="utf-8"))
    factor = record["config"]["factor"]
    task = ood.TASKS[path.stem].times(factor)
    assert record["config"] == {**task.config(), "factor": factor}
    for outside in task.outside:
        found = read(record["numbers"][outside])
        rows = record["tables"][outside]["columns"][1:]
        assert record["tables"][outside] == ood.score_table(found, rows)
        assert record["tables"][f"{outside}-differences"] == ood.difference_table(found, rows)
