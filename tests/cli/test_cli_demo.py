"""`credo demo`, with fewer and shorter trainings than it really has."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from credo.cli.commands import demo
from credo.data import load_dataset

Call = Callable[..., Any]
Refused = Callable[..., str]


@pytest.fixture
def short_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    training = {**demo._COMMON["training"], "epochs": 1, "batch_size": 256}
    model = {**demo._COMMON["model"], "hidden": [8]}
    monkeypatch.setattr(demo, "_COMMON", {**demo._COMMON, "training": training, "model": model})
    monkeypatch.setattr(demo, "DRAWS", 5)


METHODS_SHOWN = ["map", "mc-dropout", "bbb", "vogn", "noisy-kfac", "ensemble", "auto"]


@pytest.mark.slow
@pytest.mark.usefixtures("short_demo")
def test_demo(call: Call) -> None:
    result = call("demo")
    lines = [line for line in result.stdout.splitlines() if line.startswith("│")]
    assert [line.split("│")[1].strip() for line in lines] == METHODS_SHOWN
    for line in lines:
        accuracy, nll, ece, auroc, seconds = (float(job) for job in line.split("│")[2:7])
        assert 0 <= accuracy <= 1
        assert 0 <= ece <= 1
        assert 0 <= auroc <= 1
        assert min(nll, seconds) >= 0
    assert all(f"training {name}" in result.stderr for name in METHODS_SHOWN)
    assert "contrast alone detects these photographs with AUROC 1.000" in " ".join(result.stderr.split())
    found = call("demo", "--json")
    assert list(json.loads(found.stdout)) == METHODS_SHOWN
    assert "training" not in found.stderr
    assert all(Path(f"runs/demo/{name}/result.json").exists() for name in METHODS_SHOWN)


def test_contrast_alone_detects_the_photographs() -> None:
    photographs = load_dataset("photo-patches").test.x.flatten(1).std(1)
    digits = load_dataset("digits").test.x.flatten(1).std(1)
    lower = (photographs[:, None] < digits).double().mean() + (photographs[:, None] == digits).double().mean() / 2
    assert demo.contrast_auroc() == pytest.approx(lower.item(), abs=1e-6)
    assert demo.contrast_auroc() > 0.999


@pytest.mark.usefixtures("short_demo")
def test_demo_does_not_take_runs_with_other_settings(
    call: Call, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_METHODS", {"map": demo._METHODS["map"]})
    call("demo", "--folder", "mine")
    monkeypatch.setattr(demo, "_METHODS", {"map": {"name": "map", "lr": 0.5}})
    assert "method.lr is 0.003 there, 0.5 now" in refused("demo", "--folder", "mine")
