"""`credo prune` as a user runs it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import credo
from credo.cli.app import app
from credo.experiments.runs import Run

TRAINING = ["training.epochs=6", "method.lr=0.01", "method.prior=0.3", "method.temperature=0.1", "model.hidden=[32]"]


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def as_json(*arguments: str) -> Any:
    return json.loads(call(*arguments, "--json"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    call("train", *TRAINING, "--run", str(folder))
    return folder


def test_a_pruned_run_is_a_run(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "pruned"
    record = as_json("prune", str(run), "--rate", "0.75", "--out", str(out))
    weights = 64 * 32 + 32 * 10
    assert record["before"]["parameters"] == record["after"]["parameters"] == weights + 42
    assert record["after"]["kept"] == weights - round(0.75 * weights) + 42
    assert record["after"]["accuracy"] > record["before"]["accuracy"] - 0.15
    assert (
        record["after"]["file_bytes"]
        == (out / "model.safetensors").stat().st_size
        < (run / "model.safetensors").stat().st_size
    )
    assert record["after"]["forward_seconds"] > 0
    evaluated = as_json("evaluate", str(out))
    assert evaluated["accuracy"] == record["after"]["accuracy"]
    assert evaluated["nll"] == pytest.approx(record["after"]["nll"])
    assert Run(out).result()["pruning"] == record
    np.save(tmp_path / "x.npy", np.zeros((3, 8, 8), dtype=np.float32))
    assert len(as_json("predict", str(out), str(tmp_path / "x.npy"))) == 3
    table = call("prune", str(run), "--by", "magnitude", "--scope", "layer", "--out", str(tmp_path / "other"))
    assert "nonzero parameters" in table
    call("prune", str(run), "--out", str(out), code=2)


def test_a_threshold_instead_of_a_rate(run: Path, tmp_path: Path) -> None:
    mean = Run(run).posterior().mean()  # type: ignore[attr-defined]
    small = sum(int((m.abs() < 0.05).sum()) for name, m in mean.items() if name.endswith("weight"))
    options = ("--by", "magnitude", "--threshold", "0.05")
    record = as_json("prune", str(run), *options, "--out", str(tmp_path / "out"))
    assert small > 0
    assert record["after"]["kept"] == record["before"]["kept"] - small
    assert "weights below 0.05 pruned" in call("prune", str(run), *options, "--out", str(tmp_path / "again"))
    assert "give one of them" in call("prune", str(run), *options, "--rate", "0.5", code=2)


def test_a_compact_run_is_smaller(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    record = as_json("prune", str(run), "--rate", "0.5", "--structure", "units", "--compact", "--out", str(out))
    assert record["after"]["parameters"] == 65 * 16 + 17 * 10
    assert record["after"]["kept"] == record["after"]["parameters"]
    assert as_json("evaluate", str(out))["accuracy"] == record["after"]["accuracy"]
    posterior = Run(out).posterior()
    assert isinstance(posterior, credo.BBB)
    assert posterior.layout.is_whole


def test_a_sweep_writes_no_run(run: Path) -> None:
    before = {path.name for path in run.parent.iterdir()}
    rows = as_json("prune", str(run), "--sweep", "0,0.5,0.95")
    assert [row["rate"] for row in rows] == [0, 0.5, 0.95]
    assert rows[0]["accuracy"] == as_json("evaluate", str(run))["accuracy"]
    assert rows[0]["nll"] < rows[2]["nll"]
    assert json.loads((run / "pruning.json").read_text())["points"] == rows
    assert "0.9500" in call("prune", str(run), "--sweep", "0,0.95")
    assert {path.name for path in run.parent.iterdir()} == before


def test_bad_input(run: Path, tmp_path: Path) -> None:
    assert "'snr'" in call("prune", str(run), "--by", "snrr", "--out", str(tmp_path / "a"), code=2)
    assert "0,0.5,0.75" in call("prune", str(run), "--sweep", "0;1", code=2)
    assert "is no run" in call("prune", str(tmp_path), code=2)
    assert not (tmp_path / "a").exists()
