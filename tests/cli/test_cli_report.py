"""`credo report`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from credo.cli.commands import demo
from credo.experiments.runs import Run, evaluate_run

Call = Callable[..., Any]
Refused = Callable[..., str]


def test_the_path_is_all_that_is_printed(call: Call, digits_run: Path) -> None:
    result = call("report", digits_run, "--draws", 2, "--no-doctor")
    assert result.stdout == "report.html\n"
    assert "predicting with run" in result.stderr
    page = Path("report.html").read_text(encoding="utf-8")
    assert "<h1>digits: run</h1>" in page
    assert 'id="doctor"' not in page


def test_options(call: Call, digits_run: Path) -> None:
    options = ("--draws", 2, "--ood", "photo-patches", "--title", "Mine", "--examples", 3, "--no-doctor")
    assert call("report", digits_run, *options, "--out", "new/mine.html").stdout.strip() == "new/mine.html"
    page = Path("new/mine.html").read_text(encoding="utf-8")
    assert "<h1>Mine</h1>" in page
    assert page.count("<img ") == 4 * 3
    assert "1,000 photo-patches" in page


def test_json(call: Call, digits_run: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(digits_run)  # the same run by another way is the same run
    found = json.loads(call("report", digits_run, "--draws", 4, "--no-doctor", "--json").stdout)
    assert found["report"] == "report.html"
    assert found["data"] == "digits"
    assert found["draws"] == 4
    expected = evaluate_run(Run(digits_run), draws=4)
    assert found["runs"]["run"]["metrics"] == expected
    assert found["runs"]["run"]["differences"] == {}
    assert found["runs"]["run"]["diagnosis"] is None
    assert "given twice" in call("report", digits_run, tmp_path / "other", code=2).stderr


def test_differences_in_json(call: Call, digits_run: Path) -> None:
    settings = ("model.hidden=[16]", "training.epochs=1", "training.batch_size=32", "method.name=map", "method.lr=0.01")
    call("train", *settings, "--run", "map")
    found = json.loads(call("report", digits_run, "map", "--draws", 2, "--no-doctor", "--json").stdout)["runs"]
    accuracy = found["map"]["differences"]["accuracy"]
    assert accuracy["value"] == pytest.approx(found["map"]["metrics"]["accuracy"] - found["run"]["metrics"]["accuracy"])
    assert accuracy["verdict"] == "better"  # one of them has hardly begun
    assert accuracy["p_value"] < 0.05
    assert accuracy["low"] > 0


def test_a_regression(call: Call, gap_run: Path) -> None:
    call("report", gap_run, "--draws", 2, "--no-doctor")
    page = Path("report.html").read_text(encoding="utf-8")
    assert "CRPS" in page
    assert "Coverage" in page


def test_different_data(refused: Refused, digits_run: Path, gap_run: Path) -> None:
    message = refused("report", digits_run, gap_run)
    assert "was trained on gap" in message
    assert "on digits" in message
    assert not Path("report.html").exists()


def test_what_is_no_run_or_not_finished(refused: Refused, digits_run: Path) -> None:
    assert "nothing is no run" in refused("report", digits_run, "nothing")
    Path("begun").mkdir()
    Path("begun/config.toml").write_bytes((digits_run / "config.toml").read_bytes())
    assert "begun is not finished" in refused("report", digits_run, "begun")
    assert not Path("report.html").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ood", "gap"), "gap has inputs of shape (1,), the runs were trained on (1, 8, 8)"),
        (("--ood", "photo-patch"), "Did you mean 'photo-patches'?"),
        (("--draws", "0"), "draws=0"),
        (("--examples", "-1"), "--examples -1"),
        (("--out", "."), ". is a folder"),
    ],
)
def test_bad_options(refused: Refused, digits_run: Path, options: tuple[str, ...], message: str) -> None:
    assert message in refused("report", digits_run, *options)


def test_demo_ends_with_its_report(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    training = {**demo._COMMON["training"], "epochs": 1, "batch_size": 256}
    monkeypatch.setattr(demo, "_COMMON", {**demo._COMMON, "training": training, "model": {"hidden": [8]}})
    monkeypatch.setattr(demo, "_METHODS", {name: demo._METHODS[name] for name in ("map", "bbb")})
    monkeypatch.setattr(demo, "DRAWS", 3)
    monkeypatch.setattr(demo, "SAMPLES", 12)
    last = call("demo", "--folder", "mine").stdout.splitlines()[-1]
    assert last == "mine/report.html"
    page = Path(last).read_text(encoding="utf-8")
    for heading in ("Sampled networks", "Accuracies of sampled networks", "Doctor", "Confident about photo-patches"):
        assert f">{heading}</h" in page
    assert "the report is mine/report.html" in call("demo", "--folder", "mine", "--json").stderr


def test_nothing_to_report_on(call: Call) -> None:
    assert call("report", code=2).stdout == ""
