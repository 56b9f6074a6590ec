"""`credo attack`: accuracies that the library also gives, a file to go on with, refusals."""

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from credo import predict
from credo.attacks import fgsm, load_attack_set, minimal, pgd, posterior_logits
from credo.attacks.sets import chunk_seed
from credo.cli.attack_options import ATTACKS, attack_options
from credo.experiments.runs import Run

Call = Callable[..., Any]
QUICK = ("--count", 60, "--steps", 3, "--draws", 2)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_numbers_and_file(call: Call, digits_run: Path, norm: str) -> None:
    found = json.loads(call("attack", digits_run, "--norm", norm, *QUICK, "--out", "set.safetensors", "--json").stdout)
    stored = load_attack_set("set.safetensors")
    run = Run(digits_run)
    test = run.dataset().test
    difference = stored.inputs.double() - test.x[:60].double()
    length = difference.abs().amax() if norm == "linf" else difference.flatten(1).norm(dim=1).amax()
    assert 0.09 < float(length) <= 0.1
    assert torch.equal(stored.labels, test.y[:60])
    for name, x in (("clean", test.x[:60]), ("attacked", stored.inputs)):
        labels = predict(run.posterior(), x).labels
        right = float((labels == test.y[:60]).double().mean())
        assert found["accuracy"]["all draws averaged"][name] == pytest.approx(right)
    assert found["accuracy"]["one draw, on average"].keys() == {"clean", "attacked"}
    assert found["distortion"] == pytest.approx(float(stored.result.distortion.mean()))
    assert found["count"] == 60
    assert stored.about["options"] == {"epsilon": 0.1, "norm": norm, "steps": 3}
    assert (stored.about["threat"], stored.about["draws"], stored.about["data"]) == ("fresh", 2, "digits, test")
    assert stored.about["source"]["experiment"]["model"]["hidden"] == [16]


def test_the_smallest_changes(call: Call, digits_run: Path) -> None:
    result = call("attack", digits_run, "--attack", "minimal", "--count", 40, "--draws", 3, "--out", "m.safetensors")
    stored = load_attack_set("m.safetensors")
    assert stored.about["threat"] == "fixed"
    success = float(stored.result.success.double().mean())
    assert success >= 0.9
    assert f"{100 * success:.1f}% succeeded during the attack" in result.stderr
    assert "all draws averaged" in result.stdout
    assert "40 attacked inputs in m.safetensors" in result.stderr


def test_the_default_file_and_a_second_time(call: Call, refused: Call, digits_run: Path) -> None:
    arguments = ("attack", digits_run, "--attack", "fgsm", "--epsilon", 0.05, "--count", 30, "--draws", 2)
    first = call(*arguments)
    path = digits_run / "attacks" / "fgsm-linf-0.05-draws2-first30.safetensors"
    before = path.stat().st_mtime_ns
    assert "fgsm-linf-0.05" in first.stdout
    assert call(*arguments).stdout == first.stdout
    assert path.stat().st_mtime_ns == before
    call(*arguments, "--seed", 1)
    assert (path.parent / "fgsm-linf-0.05-draws2-first30-seed1.safetensors").exists()
    assert "seed is 0 there, 1 now" in refused(*arguments, "--seed", 1, "--out", path)


def test_a_class_to_reach_and_restarts(call: Call, refused: Call, digits_run: Path) -> None:
    run = Run(digits_run)
    test = run.dataset().test
    target = int(predict(run.posterior(), test.x[:60]).labels.mode().values)  # hardly trained: not every class is
    arguments = ("attack", digits_run, *QUICK, "--epsilon", 0.4, "--target", target)
    once = json.loads(call(*arguments, "--json").stdout)
    again = json.loads(call(*arguments, "--restarts", 3, "--json").stdout)
    stored = load_attack_set(again["file"])
    others = test.y[:60] != target
    assert torch.equal(stored.labels, test.y[:60][others])
    assert stored.about["target"] == target
    assert Path(again["file"]).name == f"pgd-linf-0.4-steps3-restarts3-target{target}-draws2-first60.safetensors"
    before = float((predict(run.posterior(), test.x[:60][others]).labels == target).double().mean())
    after = float((predict(run.posterior(), stored.inputs).labels == target).double().mean())
    assert after > before + 0.1
    assert once["success"] <= again["success"] + 0.05
    assert "only pgd" in refused("attack", digits_run, "--attack", "fgsm", "--restarts", 2)
    assert "0 to 9" in refused("attack", digits_run, "--target", 10)


def test_the_smallest_changes_to_any_other_class(call: Call, refused: Call, digits_run: Path) -> None:
    arguments = ("attack", digits_run, "--attack", "minimal", "--count", 40, "--draws", 3, "--json")
    found = json.loads(call(*arguments, "--target", "any").stdout)
    stored = load_attack_set(found["file"])
    run = Run(digits_run)
    test = run.dataset().test
    logits = posterior_logits(run.posterior(), "fixed", draws=3, seed=chunk_seed(0, 0))
    expected = minimal(logits, test.x[:40], test.y[:40], targets=None)
    assert torch.equal(stored.inputs, expected.inputs)
    assert Path(found["file"]).name == "minimal-targetany-draws3-first40.safetensors"
    assert found["target"] == "any"
    runner_up = json.loads(call(*arguments).stdout)
    assert runner_up["distortion"] != found["distortion"]
    assert json.loads(call(*arguments, "--target", "runner-up").stdout) == runner_up
    assert "only minimal can target" in refused("attack", digits_run, "--target", "runner-up")
    for wrong in ("three", "-1", "--3", "10", "1.5"):
        assert "give a class from 0 to 9" in refused("attack", digits_run, "--target", wrong)


def test_any_other_class_is_what_pgd_reaches_anyway(call: Call, digits_run: Path) -> None:
    found = json.loads(call("attack", digits_run, *QUICK, "--target", "any", "--json").stdout)
    assert json.loads(call("attack", digits_run, *QUICK, "--json").stdout) == found


def test_one_network_is_one_draw(call: Call, digits_run: Path) -> None:
    found = json.loads(call("attack", digits_run, "--threat", "one", "--steps", 3, "--count", 30, "--json").stdout)
    assert Path(found["file"]).name == "pgd-linf-0.1-one-steps3-first30.safetensors"
    assert found["draws"] == 1


@pytest.mark.parametrize(
    ("attack", "option", "message"),
    [
        ("minimal", ("--epsilon", 0.5), "--epsilon 0.5 is an option of fgsm and pgd"),
        ("minimal", ("--norm", "linf"), "--norm linf is an option of fgsm and pgd"),
        ("minimal", ("--restarts", 2), "--restarts 2 is an option of pgd"),
        ("fgsm", ("--steps", 7), "--steps 7 is an option of minimal and pgd"),
        ("fgsm", ("--confidence", 3), "--confidence 3.0 is an option of minimal"),
        ("pgd", ("--confidence", 3), "--confidence 3.0 is an option of minimal"),
        # Also what would be the default elsewhere: it was said, and means nothing.
        ("minimal", ("--epsilon", 0.1), "no effect on minimal: it finds the smallest change"),
        ("pgd", ("--threat", "one", "--draws", 50), "--draws 50 is an option of the threats fresh, mixture, fixed"),
    ],
)
def test_options_without_a_meaning_are_refused(
    refused: Call, digits_run: Path, attack: str, option: tuple[Any, ...], message: str
) -> None:
    assert message in refused("attack", digits_run, "--attack", attack, "--count", 5, *option)


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_defaults_of_the_command_are_those_of_the_library(attack: str) -> None:
    library = {"fgsm": fgsm, "minimal": minimal, "pgd": pgd}[attack]
    known = {name: parameter.default for name, parameter in inspect.signature(library).parameters.items()}
    for key, value in attack_options(attack, {}).items():
        assert known[key] in (value, inspect.Parameter.empty), key


def test_the_help_says_what_is_done_by_default(call: Call) -> None:
    text = re.sub(r"[│\s]+", " ", call("attack", "--help").stdout)
    for default in ("0.1", "linf", "40 for pgd, 200 at most for minimal", "10", "0.001 for minimal", "1 for pgd"):
        assert f"Default: {default}." in text, default


def test_plain_features(call: Call, tmp_path: Path) -> None:
    settings = ("data.name=moons", "method.name=map", "training.epochs=2", "--draws", 2)
    call("train", *settings, "--run", "moons")
    found = json.loads(call("attack", "moons", "--epsilon", 0.3, "--steps", 5, "--json").stdout)
    data = Run("moons").dataset()
    every = torch.cat([data.train.x, data.test.x])
    assert found["bounds"] == [float(every.min()), float(every.max())]
    assert list(found["accuracy"]) == ["all draws averaged"]
    assert found["accuracy"]["all draws averaged"]["attacked"] < found["accuracy"]["all draws averaged"]["clean"]


def test_refusals(refused: Call, digits_run: Path, gap_run: Path) -> None:
    assert "Unknown attack 'pdg'. Did you mean 'pgd'?" in refused("attack", digits_run, "--attack", "pdg")
    assert "Unknown norm 'l1'" in refused("attack", digits_run, "--norm", "l1", "--out", "x")
    assert "Unknown threat 'none'" in refused("attack", digits_run, "--threat", "none", "--out", "x")
    assert "epsilon=-1" in refused("attack", digits_run, "--epsilon", -1, "--out", "x")
    assert "--count 0" in refused("attack", digits_run, "--count", 0)
    assert "this run is a regression" in refused("attack", gap_run)
    assert "is no run" in refused("attack", "nowhere")
