"""A prediction that several processes share is that of one, whoever makes which draws or batches."""

import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import nn

from credo import BBB, predict

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from forks import load  # noqa: E402
from predict_worker import BUILDS, CASES, DRAWS, asked, batches  # noqa: E402

sys.path.pop(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("predictions")
    done = forked.run(HERE / "predict_worker.py", str(place), folder=place)
    assert done.returncode == 0, done.stdout
    assert not re.search(r"\[.*[1-9].*\]", done.stdout), done.stdout  # exit codes
    return place


def assert_same(ours: Any, theirs: Any) -> None:
    for field in fields(theirs):
        torch.testing.assert_close(getattr(ours, field.name), getattr(theirs, field.name), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("name", "option"), CASES)
def test_shared_predictions_are_those_of_one_process(folder: Path, name: str, option: str) -> None:
    (one,) = load(folder, "predicted", 1)
    reference = one[f"{name}, {option}, draws"]
    several = [found for world in (1, 2, 3) for found in load(folder, "predicted", world)]
    assert len(several) == 6
    for found in several:
        for shard in ("draws", "data"):
            assert_same(found[f"{name}, {option}, {shard}"], reference)
    assert_same(asked(BUILDS[name](), option, "draws"), reference)  # without any process_group


def test_tolerance_stops_early_and_draws_differ(folder: Path) -> None:
    (one,) = load(folder, "predicted", 1)
    used = one["ensemble, tolerance, draws"].draws_used
    assert used.unique().tolist() == [12, 24]
    plain, again = one["bbb conv, plain, draws"], one["bbb, shared draws, draws"]
    assert plain.epistemic.min() > 0
    assert again.epistemic.min() > 0


def test_the_work_is_divided_and_a_plain_prediction_stays_local(folder: Path) -> None:
    (one,) = load(folder, "predicted", 1)
    assert one["rows, draws"] == one["rows, data"] == DRAWS * 18
    two = load(folder, "predicted", 2)
    assert [found["rows, draws"] for found in two] == [DRAWS // 2 * 18, DRAWS // 2 * 18]
    assert [found["rows, data"] for found in two] == [DRAWS * (7 + 4), DRAWS * 7]
    assert all(before == after for before, after in (found["bytes"] for found in two))
    posterior = BUILDS["bbb conv"]()
    assert_same(two[0]["local"], predict(posterior, batches(posterior), draws=5))


def test_what_fails_in_one_process_fails_in_all(folder: Path) -> None:
    first, second = load(folder, "failing", 2)
    assert second["data"].startswith("ValueError: Labels run from")
    assert first["data"].startswith("CredoError: Another process failed")
    assert second["draws"] == "OSError: the lamp fell over"
    assert first["draws"].startswith("CredoError: Another process failed")
    assert first["bad label"].startswith("ValueError: Labels run from")
    assert first["bad label"] == second["bad label"]
    assert "2 of 18 rows" in first["blank"]  # each of them saw one
    assert "The inputs of rows 8, 16 are NaN or infinite already" in first["blank"]
    assert first["blank"] == second["blank"]
    assert_same(first["after"], second["after"])  # they are together still
    assert first["seconds"] < 20


def test_evaluate_is_shared(folder: Path) -> None:
    (one,), (first, second) = (load(folder, "evaluated", world) for world in (1, 2))
    assert json.loads(first["printed"]) == json.loads(first["written"])
    assert second["printed"] == ""
    assert_alike(json.loads(first["written"]), json.loads(one["written"]))


def assert_alike(ours: Any, theirs: Any) -> None:
    """The same numbers but for rounding, also those in lists and tables."""
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            assert_alike(ours[key], value)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_alike(mine, other)
    else:
        assert ours == (pytest.approx(theirs, rel=1e-4, abs=1e-6) if isinstance(theirs, float) else theirs)


def test_numbered_draws_have_the_same_distribution() -> None:
    torch.manual_seed(0)
    posterior = BBB(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), data_size=100, init=0.5)
    x = torch.randn(8, 3)
    for strategy in ("loop", "activation"):
        ours = predict(posterior, x, draws=1000, shard="draws", strategy=strategy)
        theirs = predict(posterior, x, draws=1000, seed=1)
        error = (ours.epistemic_by_class + theirs.epistemic_by_class).div(1000).sqrt()
        # 48 differences of means of 1000 draws: more than 4.5 standard errors once in 3000 runs.
        assert bool(((ours.probs - theirs.probs).abs() < 4.5 * error).all())
        assert ours.epistemic.sum() == pytest.approx(float(theirs.epistemic.sum()), rel=0.1)


def test_an_unknown_shard_is_refused() -> None:
    posterior = BUILDS["map"]()
    with pytest.raises(ValueError, match=r"Unknown shard 'draw'.*Did you mean 'draws'"):
        predict(posterior, batches(posterior), shard="draw")
