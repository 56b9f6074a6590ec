"""Streams as experiments: killed and resumed, data sets as tasks, features of a trained run, their reports."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from credo.continual import StreamLearner
from credo.core.errors import CredoWarning
from credo.experiments.config import make_experiment
from credo.experiments.continual import make_stream_experiment, run_stream_experiment, stream_data
from credo.experiments.continual.stream_data import load_stream
from credo.experiments.runs import Run
from credo.report.continual import render_continual

SMALL = {"couplings": 2, "hidden": 8, "low": 4, "burn_in": 5, "window": 10}


def tables(**continual: Any) -> dict[str, Any]:
    return {
        "continual": {"held_out": 100, **continual},
        "data": {"name": "digits"},
        "method": {"name": "hybrid-flow", **SMALL},
        "training": {"epochs": 1, "batch_size": 32},
    }


def result_of(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    for _ in run_stream_experiment(make_stream_experiment(given), folder):
        pass
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_a_killed_stream_resumes_with_the_numbers_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tables()
    whole = result_of(given, tmp_path / "whole")
    step: Callable[..., Any] = StreamLearner.step
    count = 0

    def killed(self: StreamLearner, x: torch.Tensor, y: torch.Tensor) -> Any:
        nonlocal count
        count += 1
        if count == 27:
            raise KeyboardInterrupt
        return step(self, x, y)

    monkeypatch.setattr(StreamLearner, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        result_of(given, tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()
    resumed = result_of(given, tmp_path / "run")
    assert {key for key in whole if whole[key] != resumed[key]} == {"seconds"}
    assert resumed["seconds"][0] > 0
    with pytest.raises(ValueError, match="other settings"):
        result_of(tables(count=2), tmp_path / "run")


def test_the_temperature_is_chosen_on_rows_of_the_tasks_in_the_stream(tmp_path: Path) -> None:
    given = make_stream_experiment(tables(order=[0, 1, 0]))
    assert sorted(set(load_stream(given).held_out.y.tolist())) == [0, 1, 2, 3]
    result = result_of(tables(order=[0, 1, 0]), tmp_path)
    assert result["temperature"] >= 1
    assert (len(result["matrix"]), result["detection"]["recurrences"]) == (3, 1)
    pairs = [*zip(result["samples"]["tasks"], result["samples"]["classes"], strict=True)]
    page = render_continual(result)
    assert result["samples"]["shape"] == [1, 8, 8], "images of fractions are images, too"
    assert page.count('alt="sample of class') == len(pairs) >= 8 * 4
    assert page.count("<title>batch ") == len(result["events"]) - 1, "the first batch is no change of task"


def test_tasks_too_short_for_their_end_to_be_found_are_warned_of(tmp_path: Path) -> None:
    given = tables(order=[0, 1])
    given["method"]["burn_in"] = 15
    with pytest.warns(CredoWarning, match=r"has 8 batches.*method.burn_in=15"):
        result = result_of(given, tmp_path / "short")
    assert result["detection"]["found"] == 0
    given["method"]["forgetting"] = "joint"
    result_of(given, tmp_path / "joint")  # has no changes of task to find, and no warning


def test_joint_training_has_a_report_without_changes_of_task(tmp_path: Path) -> None:
    given = tables()
    given["method"]["forgetting"] = "joint"
    result = result_of(given, tmp_path)
    assert len(result["matrix"][0]) == 5
    assert "backward_transfer" not in result["summary"]
    page = render_continual(result)
    assert "Changes of task" not in page
    assert "all at once" in page


def test_data_sets_are_tasks_and_samples_of_a_shared_class_name_their_task(tmp_path: Path) -> None:
    given = tables(tasks="datasets", others=["digits"])
    result = result_of(given, tmp_path)
    assert result["tasks"] == ["digits 1", "digits 2"]
    assert result["boundaries"] == [0, 41]
    result["samples"] = {
        "shape": [1, 2, 2],
        "tasks": [0, 0, 1, 1],
        "classes": [0, 1, 1, 2],
        "pixels": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    page = render_continual(result)
    for label in ("class 0<", "class 1, task 1<", "class 1, task 2<", "class 2<"):
        assert page.count(label) == 1
    for wrong in ({"tasks": "datasets"}, {"others": ["digits"]}):
        with pytest.raises(ValueError, match="needs further data sets there"):
            make_stream_experiment(tables(**wrong))


def test_features_of_a_run_take_the_place_of_inputs_and_are_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = {
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": [6]},
        "method": {"name": "map"},
        "training": {"epochs": 1},
    }
    list(Run(tmp_path / "net").train(make_experiment(experiment)))
    given = make_stream_experiment({**tables(features=str(tmp_path / "net")), "method": {"name": "hybrid-flow"}})
    data = load_stream(given)
    assert data.shape == (6,)
    assert all(split.x.shape[1] == 6 for split in data.tests)
    first = data.stream.tasks[0].x
    torch.testing.assert_close(first.mean(0), torch.zeros(6), atol=1e-5, rtol=0)
    monkeypatch.setattr(stream_data, "features_of", None)
    again = load_stream(given)
    assert torch.equal(again.stream.tasks[0].x, first)
    assert torch.equal(again.held_out.x, data.held_out.x)
    with pytest.raises(TypeError):  # other rows: the stored features are not taken
        load_stream(make_stream_experiment({**tables(features=str(tmp_path / "net"), count=2)}))


@pytest.mark.parametrize(
    ("section", "wrong", "message"),
    [
        ("method", {"decay": "abc"}, r"method.decay='abc' must be a number; the default is none\."),
        ("method", {"radius": [1]}, r"method.radius=\[1\] must be a number; the default is none\."),
        ("method", {"known_threshold": True}, "method.known_threshold=True must be a number"),
        ("continual", {"order": "01"}, "continual.order='01' must be a list; the default is none"),
        ("training", {"epochs": 1.5}, "training.epochs=1.5 must be a whole number; the default is 10"),
    ],
)
def test_a_setting_of_the_wrong_type_is_named(section: str, wrong: dict[str, Any], message: str) -> None:
    given = tables()
    with pytest.raises(ValueError, match=message):
        make_stream_experiment({**given, section: {**given[section], **wrong}})


def test_the_order_names_tasks_by_number() -> None:
    with pytest.raises(ValueError, match="order names task '1'; there are 5, counted from 0"):
        load_stream(make_stream_experiment(tables(order=[0, "1"])))


@pytest.mark.parametrize("posterior", ["bbb", "vogn"])
def test_either_posterior_of_the_couplings_starts_near_their_mean_and_learns(posterior: str, tmp_path: Path) -> None:
    given = tables(order=[0], count=2)
    given["method"] |= {"forgetting": "posterior", "posterior": posterior, "couplings": 4, "hidden": 64, "burn_in": 999}
    given["training"]["epochs"] = 15
    assert result_of(given, tmp_path)["matrix"][0][0] > 0.7
