"""`--device`, `training.device` and `training.precision` of the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from credo.cli.app import COMMANDS

Call = Callable[..., Any]
TRAIN = ("train", "data.name=moons", "data.n=120", "model.hidden=[8]", "method.name=map", "training.epochs=2")


def test_a_result_tells_device_and_precision(call: Call, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    call(*TRAIN, "training.precision=bfloat16", "--device", "cpu", "--run", folder)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["device"], result["precision"]) == ("cpu", "bfloat16")
    assert result["experiment"]["training"]["device"] == "cpu"
    call("evaluate", folder, "--device", "auto", "--json")


def test_a_run_resumed_in_another_precision_says_so(call: Call, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    call(*TRAIN, "--run", folder)
    with pytest.warns(UserWarning, match="precision float32 is now bfloat16"):
        call(*TRAIN[:-1], "training.epochs=3", "training.precision=bfloat16", "--run", folder)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["epochs"], result["precision"]) == (3, "bfloat16")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.device=gpu", "training.device='gpu' is no name of a device. Possible: auto, cpu"),
        ("training.precision=half", "Unknown training.precision 'half'"),
    ],
)
def test_what_is_not_possible_is_an_error_before_anything_is_written(
    refused: Callable[..., str], tmp_path: Path, setting: str, message: str
) -> None:
    assert message in refused(*TRAIN, setting, "--run", str(tmp_path / "run"))
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_device_that_is_not_here_is_an_error(refused: Callable[..., str], digits_run: Path) -> None:
    assert "device='meta' is not available here" in refused("evaluate", str(digits_run), "--device", "meta")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("list", "data", "summary")])
def test_every_command_that_runs_a_network_has_the_option(call: Call, name: str) -> None:
    found = call(name, "--help")
    assert "--device" in (found if isinstance(found, str) else found.output)
