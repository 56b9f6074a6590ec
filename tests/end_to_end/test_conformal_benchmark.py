"""The published tables of conformal prediction are those of the numbers beside them, which say what the page says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import conformal
from pages import ROOT

RECORD = ROOT / "results" / "benchmarks" / "conformal.json"


def test_tables_are_made_from_the_numbers() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert conformal.tables(record["numbers"]) == record["tables"]
    assert record["config"]["splits"] == conformal.SPLITS


def test_a_task_is_measured_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def outputs() -> dict[str, torch.Tensor]:
        calls.append("digits")
        probs = torch.randn(300, 4, generator=torch.Generator().manual_seed(0)).softmax(-1)
        return {"probs": probs, "y": torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(1)).squeeze(1)}

    monkeypatch.setattr(conformal, "CACHE", tmp_path / "cache")
    monkeypatch.setitem(conformal.OUTPUTS, "digits", outputs)
    given = ["--tasks", "digits", "--record", str(tmp_path / "record.json"), "--splits", "3"]
    conformal.main(given)
    first = (tmp_path / "record.json").read_bytes()
    conformal.main(given)
    assert calls == ["digits"]
    assert (tmp_path / "record.json").read_bytes() == first
    found: dict[str, Any] = json.loads(first)["numbers"]["digits"]
    assert found["levels"]["0.02"]["lac"]["coverage"] > 0.94
    assert "RAPS − APS" in capsys.readouterr().out
