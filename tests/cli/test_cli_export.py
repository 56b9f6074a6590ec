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


@pytest.mark.slow
def test_the_columns_of_a_table_are_given_as_the_command_says(call: Call, tmp_path: Path) -> None:
    rows = [f"{a!r},{'red' if a > 0.5 else 'blue'},{100 + 20 * a!r}" for a in torch.rand(60).tolist()]
    Path("table.csv").write_text("\n".join(["size,color,price", *rows]) + "\n")
    call("train", "table.csv", "method.name=map", "training.epochs=3", "--run", "run", "--draws", 1)
    said = json.loads(call("export", "run", "model.pt2", "--draws", 1, "--json").stdout)
    assert said["inputs"] == ["size", "color=blue", "color=red"]
    mean, std = (torch.tensor(said[f"input_{key}"], dtype=torch.float64) for key in ("mean", "std"))
    x = torch.tensor([[0.2, 1, 0], [0.9, 0, 1]], dtype=torch.float64)
    found = torch.export.load("model.pt2").module()(((x - mean) / std).float())[0].double()
    found = found * torch.tensor(said["target_std"]) + torch.tensor(said["target_mean"])
    Path("new.csv").write_text("size,color\n0.2,blue\n0.9,red\n")
    wanted = [row["mean"] for row in json.loads(call("predict", "run", "new.csv", "--draws", 1, "--json").stdout)]
    assert found.flatten().tolist() == pytest.approx(wanted, rel=1e-5)
    shown = call("export", "run", "model.pt2", "--draws", 1).stderr
    assert "takes the table's columns standardised, (x - mean) / std" in shown
    assert f"  size: mean {said['input_mean'][0]!r}, std {said['input_std'][0]!r}" in shown
    assert "its outputs are standardised, too" in shown
