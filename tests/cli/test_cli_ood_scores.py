"""`--ood-scores` of evaluate and report, `--ood` of doctor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from credo.detection import DETECTOR_SCORES, OWN_SCORES

Call = Callable[..., Any]
SCORES = ("--draws", 2, "--ood", "photo-patches", "--ood-scores")


def test_evaluate(call: Call, digits_run: Path) -> None:
    found = json.loads(call("evaluate", digits_run, *SCORES, "all", "--json").stdout)
    assert json.loads((digits_run / "evaluation.json").read_text()) == found
    study = found["ood_scores"]["photo-patches"]
    assert set(study["auroc"]) == set(study["fpr95"]) == {*OWN_SCORES, *DETECTOR_SCORES}
    for name, numbers in found["ood"]["photo-patches"].items():
        assert study["auroc"][name]["value"] == numbers["auroc"]
        assert study["fpr95"][name]["value"] == numbers["fpr95"]
    assert study["reference"] in OWN_SCORES
    shown = call("evaluate", digits_run, *SCORES, "knn, energy").stdout
    assert "detection of photo-patches" in shown
    assert f"{study['auroc']['knn']['value']:.4f}" in shown
    assert "vim" not in shown
    assert "replacing one with --ood-scores" in call("evaluate", digits_run, "--draws", 2).stderr


def test_report(call: Call, digits_run: Path) -> None:
    found = json.loads(call("report", digits_run, *SCORES, "mahalanobis", "--no-doctor", "--json").stdout)
    assert "mahalanobis" in found["runs"]["run"]["ood_scores"]["photo-patches"]["auroc"]
    page = Path("report.html").read_text(encoding="utf-8")
    assert "Detection of photo-patches" in page
    assert page.count("mahalanobis") >= 2  # legend and table
    assert "knn" not in page


def test_doctor(call: Call, digits_run: Path) -> None:
    options = ("--draws", 2, "--examples", 60, "--ood", "photo-patches", "--json")
    found = json.loads(call("doctor", digits_run, *options).stdout)["measurements"]["detection"]
    assert [each["name"] for each in found] == ["photo-patches"]
    assert found[0]["score"] in DETECTOR_SCORES
    assert json.loads((digits_run / "diagnosis.json").read_text())["asked"]["ood"] == ["photo-patches"]


@pytest.mark.parametrize("command", ["evaluate", "report"])
def test_refusals(refused: Callable[..., str], digits_run: Path, command: str) -> None:
    assert "needs --ood" in refused(command, digits_run, "--ood-scores", "all")
    assert "Did you mean 'knn'?" in refused(command, digits_run, *SCORES, "kn")
