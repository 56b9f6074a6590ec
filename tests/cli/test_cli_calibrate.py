"""`credo calibrate` on finished runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import credo
from credo.experiments.runs import Run

Call = Callable[..., Any]


def test_a_run_is_calibrated_in_place(call: Call, digits_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(digits_run, tmp_path / "run")
    call("evaluate", run, "--draws", 4)
    record = json.loads(call("calibrate", run, "--draws", 4, "--json").stdout)
    found = Run(run).posterior().calibration
    assert found is not None
    assert found.temperature == record["calibration"]["temperature"] != 1.0
    assert record["calibration"]["nll_after"] < record["calibration"]["nll_before"]
    assert record["after"]["test"]["nll"] < record["before"]["test"]["nll"]
    result = Run(run).result()
    assert result["test"]["nll"] == record["after"]["test"]["nll"]
    assert result["calibration"] == record["calibration"]
    assert not (run / "evaluation.json").exists()
    evaluated = json.loads(call("evaluate", run, "--draws", 4, "--json").stdout)
    assert evaluated["nll"] == pytest.approx(record["after"]["test"]["nll"])
    served = Run(run).posterior().ledger
    assert [use.purpose for use in served.uses] == ["training", "calibration", "report"]
    shown = call("calibrate", run, "--draws", 4)
    assert "cross-fitted" in shown.stdout
    assert "temperature" in shown.stderr
    call("report", run, "--no-doctor", "--draws", 4, "--examples", 0, "--out", tmp_path / "report.html")
    assert "calibrated on 144 rows: " in (tmp_path / "report.html").read_text()


def test_test_rows_are_warned_about(call: Call, gap_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(gap_run, tmp_path / "run")
    with pytest.warns(credo.ReusedRowsWarning, match="Rows for calibration have served report"):
        record = json.loads(call("calibrate", run, "--rows", "test", "--draws", 4, "--json").stdout)
    assert record["calibration"]["nll_before"] == pytest.approx(record["before"]["test"]["nll"])
    assert record["calibration"]["std_factor"] != 1.0


def test_without_validation_rows_it_says_what_to_do(call: Call, refused: Call, tmp_path: Path) -> None:
    call(
        "train",
        "data.name=moons",
        "training.epochs=1",
        "training.validation=0",
        "--run",
        tmp_path / "run",
        "--draws",
        2,
    )
    assert "training.validation=0.1" in refused("calibrate", tmp_path / "run")
    assert "is no run" in refused("calibrate", tmp_path / "nothing")
    assert "training.calibrate=true needs" in refused("train", "training.calibrate=true", "training.validation=0")


def test_training_calibrates(call: Call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    call("train", "data.name=moons", "training.epochs=1", "training.calibrate=true", "--run", run, "--draws", 2)
    assert Run(run).posterior().calibration is not None


def test_a_map_is_chosen_as_well(call: Call, refused: Call, digits_run: Path, gap_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(digits_run, tmp_path / "run")
    record = json.loads(call("calibrate", run, "--draws", 2, "--recalibrate", "temperature", "--json").stdout)
    found, stored = record["calibration"]["recalibration"], Run(run).posterior().calibration
    assert set(found["tried"]) == {"none", "temperature"}
    assert stored is not None
    assert stored.recalibration is not None
    assert (stored.recalibration.kind, stored.recalibration.rows) == (found["kind"], 144)
    assert Run(run).result()["calibration"]["recalibration"] == found
    call("report", run, "--no-doctor", "--draws", 2, "--examples", 0, "--out", tmp_path / "report.html")
    assert "recalibrated on 144 rows: " in (tmp_path / "report.html").read_text()
    assert "Possible: auto, beta" in refused("calibrate", run, "--draws", 2, "--recalibrate", "quantile")
    values = shutil.copytree(gap_run, tmp_path / "values")
    shown = call("calibrate", values, "--draws", 2, "--recalibrate", "auto")
    assert "map after it" in shown.stderr
