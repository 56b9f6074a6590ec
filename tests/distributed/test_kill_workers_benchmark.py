"""What the benchmark that kills workers says about what it saw."""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.kill_workers import make_record, place_of

from credo.training.files.checkpoint import save_checkpoint

OPTIONS = argparse.Namespace(times=2, tolerance=1e-6, folder=Path("x"))
ROW = {"seed": 0, "epochs": 3, "accuracy": 0.9, "nll": 0.3, "ece": 0.1}
KILL = {"rank": 0, "seconds": 1.5, "epoch": 1, "step": 4, "readable": 2, "unreadable": []}


def failures(kills: list[dict[str, Any]], **changes: Any) -> list[str]:
    found: list[str] = make_record(OPTIONS, kills, [{**ROW, **changes}, ROW, {**ROW, "seed": 1, "nll": 0.4}])[
        "failures"
    ]
    return found


def test_nothing_is_wrong_with_as_many_kills_and_the_same_numbers() -> None:
    record = make_record(OPTIONS, [KILL, KILL], [ROW, ROW])
    assert record["failures"] == []
    assert record["kills"] == [KILL, KILL]
    assert record["differences"] == {"accuracy": 0.0, "nll": 0.0, "ece": 0.0}


def test_too_few_kills_other_numbers_and_unreadable_checkpoints_are_failures() -> None:
    assert "Only 1 of 2 workers" in failures([KILL])[0]
    assert "nll is 0.301, undisturbed 0.3" in failures([KILL, KILL], nll=0.301)[0]
    assert "behind a checkpoint" in failures([{**KILL, "epoch": None}] * 2)[0]
    assert "nll is nan" in failures([KILL, KILL], nll=float("nan"))[0]
    assert "2 epochs were trained" in failures([KILL, KILL], epochs=2)[0]
    assert "could not be read: c.pt" in failures([KILL, {**KILL, "unreadable": ["c.pt is cut"]}])[0]


def test_checkpoints_are_read(tmp_path: Path) -> None:
    assert place_of(tmp_path) == {"epoch": None, "step": None, "readable": 0, "unreadable": []}
    for step in (1, 2):
        save_checkpoint(tmp_path / "checkpoint.pt", {"progress": {"epoch": 3, "step": step}}, keep=2)
    assert place_of(tmp_path) == {"epoch": 3, "step": 2, "readable": 2, "unreadable": []}
    (tmp_path / "checkpoint.1.pt").write_bytes(b"PK half")
    found = place_of(tmp_path)
    assert (found["step"], found["readable"]) == (2, 1)
    assert "checkpoint.1.pt is not a complete checkpoint" in found["unreadable"][0]
