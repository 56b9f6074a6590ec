"""`credo export` on finished runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Call = Callable[..., Any]


@pytest.mark.slow
def test_a_run_is_exported_and_runs_without_credo(call: Call, digits_run: Path, tmp_path: Path) -> None:
    record = json.loads(call("export", digits_run, tmp_path / "model.pt2", "--draws", 2, "--json").stdout)
    assert record["draws"] == 2
    probs, *_ = torch.export.load(record["file"]).module()(torch.rand(3, 1, 8, 8))
    assert torch.allclose(probs.sum(-1), torch.ones(3))


def test_other_formats_are_an_error(refused: Callable[..., str], digits_run: Path) -> None:
    assert "Possible: .onnx, .pt2" in refused("export", digits_run, "m.pb")
