"""Findings as Python source, as command-line options, and as JSON."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

import credo
from credo.doctor import Diagnosis, Finding
from credo.experiments.config import make_experiment
from credo.experiments.diagnosis import command_options

NOISE = {"kind": "gaussian", "std": 0.3, "learn": True}


def finding(arguments: Mapping[str, Any], **options: Any) -> Finding:
    return Finding("x", "note", "What.", "How.", arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "target", "python", "command"),
    [
        ({"init": {"std": 0.05}}, "method", "init={'std': 0.05}", "method.init.std=0.05"),
        ({"temperature": 1.0}, "method", "temperature=1", "method.temperature=1"),
        ({"noise": "lrt"}, "method", "noise='lrt'", "method.noise=lrt"),
        ({"draws": 4}, "method", "draws=4", "method.draws=4"),
        ({"data_size": 1234567}, "method", "data_size=1234567", "method.data_size=1234567"),
        ({"epochs": 80}, "training", "epochs=80", "training.epochs=80"),
        ({"baseline": None}, "diagnose", "baseline=map_posterior", "--baseline runs/plain"),
        ({"test": None}, "diagnose", "test=test_loader", ""),
        (
            {"lr": 0.1, "optimizer": {"clip_norm": 1.0}},
            "method",
            "lr=0.1, optimizer={'clip_norm': 1}",
            "method.lr=0.1 method.optimizer.clip_norm=1",
        ),
        ({}, "method", None, ""),
    ],
)
def test_arguments(arguments: dict[str, Any], target: str, python: str | None, command: str) -> None:
    found = finding(arguments)
    assert found.target == target  # inferred
    assert found.argument == python
    assert command_options(found.to_dict(), {"name": "bbb"}) == command


def test_draws_of_a_prediction() -> None:
    found = finding({"draws": 64}, target="predict")
    assert found.argument == "draws=64"
    assert command_options(found.to_dict(), {"name": "bbb"}) == "--draws 64"


def test_an_ensemble_keeps_its_members_options_apart() -> None:
    method = {"name": "ensemble", "of": {"name": "bbb"}}
    assert command_options(finding({"temperature": 0.1}).to_dict(), method) == "method.of.temperature=0.1"
    assert command_options(finding({"epochs": 8}).to_dict(), method) == "training.epochs=8"


def test_a_likelihood_is_one_that_methods_and_experiments_take() -> None:
    found = finding({"likelihood": NOISE})
    assert found.argument == "likelihood=credo.GaussianNoise(std=0.3, learn=True)"
    made = eval((found.argument or "").partition("=")[2], {"credo": credo})
    assert made.config() == credo.core.likelihood.make_likelihood(NOISE).config()
    options = command_options(found.to_dict(), {"name": "bbb"})
    prefix = "method.likelihood."
    assert options == f"{prefix}kind=gaussian {prefix}std=0.3 {prefix}learn=true"
    make_experiment({"data": {"name": "gap"}, "method": {"name": "bbb", "likelihood": NOISE}})


def test_json_has_the_structure_and_the_text() -> None:
    diagnosis = Diagnosis("v", (finding({"likelihood": NOISE}),), {}, ())
    (stored,) = json.loads(json.dumps(diagnosis.to_dict()))["findings"]
    assert stored["arguments"] == {"likelihood": NOISE}
    assert stored["target"] == "method"
    assert stored["argument"] == "likelihood=credo.GaussianNoise(std=0.3, learn=True)"


def test_findings_of_an_earlier_version_have_no_options() -> None:
    assert command_options({"name": "x", "argument": "lr=0.05"}, {"name": "bbb"}) == ""


@pytest.mark.parametrize("wrong", [{"severity": "bad"}, {"target": "nowhere"}])
def test_unknown_severity_or_target(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="possible are"):
        Finding(**{"name": "x", "severity": "note", "text": "", "advice": "", **wrong})
