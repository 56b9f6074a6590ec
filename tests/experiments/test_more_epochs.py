"""A run resumes with more epochs, finished or not; fewer than are done raise an error."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from credo.experiments.config import Experiment
from credo.experiments.runs import ABOUT_MODEL, Run

Small = Callable[..., Experiment]


def run_to(folder: Path, experiment: Experiment, epochs: int) -> list[int]:
    """Train to that many epochs; which were done."""
    asked = replace(experiment, training=replace(experiment.training, epochs=epochs))
    return [record.epoch for record in Run(folder).train(asked, draws=2)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


def assert_alike(folder: Path, other: Path) -> None:
    found, wanted = weights(folder), weights(other)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    results = [Run(place).result() for place in (folder, other)]
    assert results[0]["test"] == results[1]["test"]
    assert results[0]["epochs"] == results[1]["epochs"]
    assert results[0]["experiment"] == results[1]["experiment"]


@pytest.mark.parametrize(
    "method", [{"name": "bbb", "temperature": 1.0}, {"name": "ensemble", "members": 2, "of": {"name": "map"}}]
)
def test_a_finished_run_goes_on_as_one_that_was_planned_longer(
    tmp_path: Path, small: Small, method: dict[str, Any]
) -> None:
    experiment = small(method=method)
    assert run_to(tmp_path / "more", experiment, 2) == [1, 2]
    assert run_to(tmp_path / "more", experiment, 4) == [1, 2, 3, 4]
    run_to(tmp_path / "whole", experiment, 4)
    assert_alike(tmp_path / "more", tmp_path / "whole")
    assert run_to(tmp_path / "more", experiment, 4) == [], "it is finished"


def test_an_unfinished_run_may_be_planned_longer_or_shorter(tmp_path: Path, small: Small) -> None:
    experiment = small(training={"epochs": 5})
    for epochs in (3, 7):
        folder = tmp_path / str(epochs)
        next(Run(folder).train(experiment, draws=2))
        assert run_to(folder, experiment, epochs) == list(range(1, epochs + 1))
        assert Run(folder).experiment().training.epochs == epochs


def test_a_continuation_survives_being_broken_off(tmp_path: Path, small: Small) -> None:
    experiment = small()
    run_to(tmp_path / "broken", experiment, 2)
    longer = replace(experiment, training=replace(experiment.training, epochs=5, checkpoint_every=1))
    for last in (1, 3, 4):  # at once, in the middle, before the end
        training = Run(tmp_path / "broken").train(longer, draws=2)
        while next(training).epoch < last:
            pass
        training.close()
        assert not Run(tmp_path / "broken").finished, "the result of two epochs is not that of five"
    run_to(tmp_path / "broken", experiment, 5)
    run_to(tmp_path / "whole", experiment, 5)
    assert_alike(tmp_path / "broken", tmp_path / "whole")


def test_what_is_said_of_the_model_before_is_removed(tmp_path: Path, small: Small) -> None:
    run_to(tmp_path, small(), 2)
    for name in ABOUT_MODEL:
        (tmp_path / name).write_text("{}")
    assert run_to(tmp_path, small(), 2) == []
    assert all((tmp_path / name).exists() for name in ABOUT_MODEL)
    run_to(tmp_path, small(), 3)
    assert not any((tmp_path / name).exists() for name in ABOUT_MODEL)
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3


def test_a_cosine_is_that_of_the_new_number_of_epochs(tmp_path: Path, small: Small) -> None:
    experiment = small(training={"schedule": "cosine"})
    run_to(tmp_path / "more", experiment, 2)
    run_to(tmp_path / "more", experiment, 6)
    run_to(tmp_path / "whole", experiment, 6)
    rates = [
        [json.loads(line)["lr_scale"] for line in (tmp_path / place / "log.jsonl").read_text().splitlines()]
        for place in ("more", "whole")
    ]
    assert rates[0][2:] == rates[1][2:]
    assert rates[0][1] < rates[0][2], "after the end of the short cosine the rate rises again"


def test_fewer_epochs_than_are_done_are_refused_and_change_nothing(tmp_path: Path, small: Small) -> None:
    run_to(tmp_path, small(), 3)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"has already trained 3 epochs, more than training\.epochs=2"):
        run_to(tmp_path, small(), 2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_epoch_that_was_begun_counts_as_done(tmp_path: Path, small: Small) -> None:
    experiment = small(training={"epochs": 4, "checkpoint_every": 1})
    asked = iter([False] * 4 + [True])  # in the second of three steps of the second epoch

    def stop() -> bool:
        return next(asked, False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("credo.experiments.runs.StopRequest", lambda: stop)
        with pytest.raises(Exception, match="after step 2 of 3 of epoch 2"):
            list(Run(tmp_path).train(experiment, draws=2))
    with pytest.raises(ValueError, match="has already trained 2 epochs"):
        run_to(tmp_path, experiment, 1)


def test_a_run_that_stopped_early_does_not_go_on(tmp_path: Path, small: Small) -> None:
    training = {"patience": 1, "validation": 0.3, "monitor": "accuracy"}
    experiment = small(method={"name": "map", "lr": 0.3}, training=training)
    done = len(run_to(tmp_path, experiment, 50))
    assert done < 50
    with pytest.raises(ValueError, match=rf"Early stopping \(training\.patience=1\) ended .* after {done} epochs"):
        run_to(tmp_path, experiment, 60)
    assert Run(tmp_path).finished


def test_a_run_without_its_checkpoint_does_not_go_on(tmp_path: Path, small: Small) -> None:
    run_to(tmp_path, small(), 2)
    (tmp_path / "checkpoint.pt").unlink()
    with pytest.raises(ValueError, match=r"has no checkpoint\.pt .*model\.weights="):
        run_to(tmp_path, small(), 3)
    assert Run(tmp_path).finished
