"""`credo summary`, `credo evaluate --shift` and `credo train method.name=node-bnn`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from credo.cli.commands import evaluate

Call = Callable[..., Any]
Refused = Callable[..., str]


def test_summary_by_name(call: Call) -> None:
    result = call("summary", "resnet50")
    *_, norms, total, ratio, _ = (line.replace("│", " ").split() for line in result.stdout.splitlines())
    assert total == ["total", "54", "layers", "25,557,032", "24,579"]
    assert ratio == ["weights", "per", "node", "1,040"]
    assert "layer1.0.downsample.0" in result.stdout
    assert norms == ["others", "53", "BatchNorm2d", "53,120", "–"]
    found = json.loads(call("summary", "mlp", "inputs=[4]", "hidden=[3]", "classes=2", "--json").stdout)
    assert (found["weights"], found["nodes"], len(found["layers"])) == (4 * 3 + 3 + 3 * 2 + 2, 7, 2)


def test_summary_of_a_run(call: Call, refused: Refused, digits_run: Path) -> None:
    found = json.loads(call("summary", digits_run, "--json").stdout)
    assert (found["name"], found["nodes"]) == ("mlp", 64 + 16)
    assert "omit classes=3" in refused("summary", digits_run, "classes=3")
    assert "Unknown model 'resnet5'" in refused("summary", "resnet5")
    assert "have no section" in refused("summary", "mlp", "model.hidden=[3]")
    assert "'lenet5' is not an option: give one network" in refused("summary", "mlp", "lenet5")


def test_evaluating_under_shift(call: Call, refused: Refused, digits_run: Path, gap_run: Path) -> None:
    asked = ("--shift", "--shift-kinds", "fog,contrast", "--shift-examples", 60, "--draws", 2)
    result = call("evaluate", digits_run, *asked)
    assert "corrupted images" in result.stdout
    assert "mean of 1 to 5" in result.stdout
    assert [line for line in result.stderr.splitlines() if line.endswith(" …")] == ["fog …", "contrast …"]
    found = json.loads(call("evaluate", digits_run, *asked, "--json").stdout)["shift"]
    assert (found["examples"], set(found["kinds"])) == (60, {"fog", "contrast"})
    assert json.loads((digits_run / "evaluation.json").read_text())["shift"] == found
    assert "is a regression" in refused("evaluate", gap_run, "--shift")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shift", "--shift-kinds", "fogg"), "Did you mean 'fog'"),
        (("--shift", "--shift-kinds", ","), "No kind of corruption in ','"),
        (("--shift", "--shift-kinds", "saturate"), "saturate"),
        (("--shift", "--shift-examples", 0), "--shift-examples 0: give 1 or more, or omit it for all 359"),
        (("--shift-kinds", "fogg"), "--shift-kinds fogg needs --shift: add it"),
        (("--shift-kinds", "common"), "--shift-kinds common needs --shift"),
        (("--shift-examples", 60), "--shift-examples 60 needs --shift"),
    ],
)
def test_shift_is_refused_before_anything_is_measured(
    refused: Refused, digits_run: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[Any, ...], message: str
) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(evaluate, "evaluate_run", lambda *given, **options: measured.append(given) or {})
    assert message in refused("evaluate", digits_run, *options)
    assert measured == []


def test_training_and_listing_a_node_based_bnn(call: Call, tmp_path: Path) -> None:
    settings = ("model.hidden=[8]", "training.epochs=1", "training.batch_size=256", "--draws", 4)
    node = ("method.name=node-bnn", "method.components=2", "method.nodes.side=both", "method.nodes.bias_scale=true")
    result = json.loads(call("train", *settings, *node, "--run", tmp_path / "run", "--json").stdout)
    assert result["test"]["mean_draws"] == 4
    assert result["experiment"]["method"]["components"] == 2
    assert "components" in call("list", "node-bnn").stdout
