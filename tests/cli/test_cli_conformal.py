"""`credo evaluate --conformal` stores sets or intervals in a run: `evaluate`, `predict` and `report` show them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from credo import ReusedRowsWarning
from credo.experiments.config import in_order
from credo.experiments.runs import Run

Call = Callable[..., Any]


def test_sets_and_abstention_of_a_run(call: Call, digits_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(digits_run, tmp_path / "run")
    before = json.loads(call("evaluate", run, "--draws", 4, "--json").stdout)
    assert "conformal" not in before
    options = ("--conformal", 0.2, "--conformal-kind", "raps", "--max-error", 0.9)
    shown = call("evaluate", run, "--draws", 4, *options)
    assert "80 % coverage from 96 rows" in shown.stderr
    assert "not under shift" in shown.stderr
    assert "conformal size" in shown.stdout
    stored = json.loads((run / "evaluation.json").read_text())
    assert stored["conformal"]["coverage"] > 0.65
    assert sum(stored["conformal"]["sizes"]) == 359
    assert stored["abstention"]["rows"] == 144
    assert stored["abstention"]["bound"] <= 0.9
    assert stored["nll"] == pytest.approx(before["nll"])
    assert json.loads((run / "abstention.json").read_text())["draws"] == 4
    found = Run(run).posterior()
    assert found.conformal is not None
    assert found.conformal.kind == "raps"
    assert [use.purpose for use in found.ledger.uses] == ["training", "conformal", "report"]
    np.save(tmp_path / "x.npy", np.zeros((2, 8, 8), dtype=np.float32))
    rows = json.loads(call("predict", run, tmp_path / "x.npy", "--draws", 4, "--json").stdout)
    assert rows[0]["set"]
    assert all((row["label"] is None) == row["abstained"] for row in rows)
    call("predict", run, tmp_path / "x.npy", "--draws", 4, "--output", tmp_path / "rows.csv")
    assert ", ".join(map(str, rows[0]["set"])) in (tmp_path / "rows.csv").read_text()
    call("report", run, "--no-doctor", "--draws", 4, "--examples", 0, "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Conformal prediction" in page
    assert "classes in the set" in page
    with pytest.warns(ReusedRowsWarning, match="have served conformal"):
        call("calibrate", run, "--draws", 4)  # other predictions: chosen anew if wanted
    assert Run(run).posterior().conformal is None
    assert not (run / "abstention.json").exists()


def test_predict_abstains_as_evaluate_stored(call: Call, digits_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(digits_run, tmp_path / "run")
    np.save(tmp_path / "x.npy", Run(run).dataset().test.x[:60].numpy())
    predict = ("predict", run, tmp_path / "x.npy", "--draws", 4, "--json")
    plain = json.loads(call(*predict).stdout)
    assert "abstained" not in plain[0]
    totals = sorted(row["total"] for row in plain)
    rule = {"threshold": totals[20], "max_error": 0.1, "confidence": 0.95, "accepted": 0.3, "error": 0.0, "bound": 0.1}
    (run / "abstention.json").write_text(json.dumps({**rule, "rows": 144, "draws": 8}))
    shown = call(*predict)
    rows = json.loads(shown.stdout)
    assert [row["abstained"] for row in rows] == [row["total"] >= totals[20] for row in plain]
    assert [row["label"] for row in rows] == [None if r["total"] >= totals[20] else r["label"] for r in plain]
    assert "40 of 60 rows have no label" in shown.stderr
    assert "wrong at most 10 % of the time" in shown.stderr
    assert "chosen for 8 draws, and these are 4" in shown.stderr
    (run / "abstention.json").write_text(json.dumps({**rule, "threshold": None, "rows": 144, "draws": 4}))
    assert not any(row["abstained"] for row in json.loads(call(*predict).stdout))
    call("evaluate", run, "--draws", 4, "--max-error", 0.0001)  # which no threshold keeps
    assert not (run / "abstention.json").exists()


def test_rows_that_were_held_out_for_it(call: Call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("training.epochs=1", "training.patience=1", "training.conformal=0.2", "training.validation_draws=1")
    call("train", "--run", run, *options, "--draws", 2)
    trained = Run(run)
    rows, validation = trained.conformal_rows(), trained.validation()
    assert (len(rows), len(validation), trained.posterior().data_size) == (288, 144, 1438 - 288 - 144)
    every = [{tuple(row.tolist()) for row in part.x.flatten(1)} for part in (rows, validation)]
    assert not every[0] & every[1]
    shown = call("evaluate", run, "--draws", 2, "--conformal", 0.1)  # a warning of reused rows would be an error
    assert "from 288 rows" in shown.stderr
    assert set(trained.posterior().ledger.served(in_order(rows))) == {"conformal"}


def test_validation_rows_that_stopped_training_give_a_warning(call: Call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    call("train", "--run", run, "training.epochs=1", "training.patience=1", "training.validation_draws=1", "--draws", 2)
    with pytest.warns(ReusedRowsWarning, match="early stopping"):
        call("evaluate", run, "--draws", 2, "--conformal", 0.1)


def test_intervals_of_a_run(call: Call, gap_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(gap_run, tmp_path / "run")
    options = ("--draws", 4, "--tolerance", 0.3, "--conformal", 0.5)
    found = json.loads(call("evaluate", run, *options, "--json").stdout)
    assert found["conformal"]["width"] > 0
    chosen = Run(run).posterior().conformal
    assert chosen is not None
    assert (chosen.draws, chosen.tolerance) == (4, 0.3)
    np.save(tmp_path / "x.npy", np.zeros((1, 1), dtype=np.float32))
    (row,) = json.loads(call("predict", run, tmp_path / "x.npy", "--draws", 4, "--json").stdout)
    assert row["lower"] < row["mean"] < row["upper"]
    call("report", run, "--no-doctor", "--draws", 4, "--examples", 0, "--out", tmp_path / "report.html")
    assert "width of the interval" in (tmp_path / "report.html").read_text()


def test_wrong_options_are_explained(refused: Call, digits_run: Path, gap_run: Path) -> None:
    assert "needs --conformal ALPHA" in refused("evaluate", digits_run, "--by-class")
    assert "alpha=1.5" in refused("evaluate", digits_run, "--conformal", 1.5)
    assert "'apps'" in refused("evaluate", digits_run, "--conformal", 0.1, "--conformal-kind", "apps")
    assert "is a regression" in refused("evaluate", gap_run, "--max-error", 0.1)
