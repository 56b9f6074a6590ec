"""`credo evaluate --attack-set`: scores that the library also gives, beside the clean ones; refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from credo import predict
from credo.attacks import make_attack_set
from credo.attacks.common import AttackResult, distortions
from credo.evaluate import accuracy, ece, nll
from credo.experiments.runs import Run

Call = Callable[..., Any]


def write_set(path: str, x: Tensor, y: Tensor, shift: float = 0.3) -> Tensor:
    """A set whose attack makes every input greyer; returns the inputs."""

    def grey(x: Tensor, y: Tensor, seed: int) -> AttackResult:
        inputs = (x + shift * (0.5 - x)).clamp(0, 1)
        return AttackResult(inputs, torch.ones(len(x)) > 0, distortions(inputs, x), torch.ones(len(x)).long())

    return make_attack_set(path, grey, x, y, about={"attack": "grey", "shift": shift}).inputs


def test_scores_of_two_sets_beside_the_clean_ones(call: Call, digits_run: Path) -> None:
    run = Run(digits_run)
    test = run.dataset().test
    inputs = {
        "a.safetensors": write_set("a.safetensors", test.x, test.y),
        "b.safetensors": write_set("b.safetensors", test.x[:70], test.y[:70], shift=0.8),
    }
    arguments = ("evaluate", digits_run, *(part for path in inputs for part in ("--attack-set", path)))
    found = json.loads(call(*arguments, "--draws", 6, "--json").stdout)
    assert json.loads((digits_run / "evaluation.json").read_text()) == found
    sets = found["attack_sets"]
    assert list(sets) == list(inputs)
    for path, attacked in inputs.items():
        count = len(attacked)
        assert sets[path]["count"] == count
        assert sets[path]["distortion"] == pytest.approx(float(distortions(attacked, test.x[:count]).mean()))
        for when, x in (("clean", test.x[:count]), ("attacked", attacked)):
            batches = [(part, labels) for part, labels in zip(x.split(512), test.y[:count].split(512), strict=True)]
            probs, labels = predict(run.posterior(), batches, draws=6).probs, test.y[:count]
            wanted = {"accuracy": accuracy(probs, labels), "nll": nll(probs, labels), "ece": ece(probs, labels)}
            assert sets[path][when] == pytest.approx(wanted, rel=1e-4)
    assert sets["a.safetensors"]["clean"]["nll"] == pytest.approx(found["nll"])
    assert sets["a.safetensors"]["attacked"] != sets["a.safetensors"]["clean"]
    shown = call(*arguments, "--draws", 6).stdout
    assert "accuracy clean" in shown
    assert f"{sets['b.safetensors']['attacked']['accuracy']:.4f}" in shown


def test_a_set_of_other_inputs_has_no_clean_scores(call: Call, digits_run: Path) -> None:
    test = Run(digits_run).dataset().test
    write_set("other.safetensors", test.x[:40].flip(-1), test.y[:40])
    arguments = ("evaluate", digits_run, "--attack-set", "other.safetensors", "--draws", 3)
    assert json.loads(call(*arguments, "--json").stdout)["attack_sets"]["other.safetensors"]["clean"] is None
    assert "–" in call(*arguments).stdout


def test_what_credo_attack_writes_is_taken(call: Call, digits_run: Path) -> None:
    call("attack", digits_run, "--attack", "fgsm", "--count", 30, "--draws", 2, "--out", "set.safetensors")
    found = json.loads(call("evaluate", digits_run, "--attack-set", "set.safetensors", "--draws", 4, "--json").stdout)
    scores = found["attack_sets"]["set.safetensors"]
    assert scores["attacked"]["nll"] > scores["clean"]["nll"]


def test_without_sets_nothing_is_new(call: Call, digits_run: Path) -> None:
    assert "attack_sets" not in json.loads(call("evaluate", digits_run, "--draws", 2, "--json").stdout)


def test_files_that_do_not_fit(refused: Call, digits_run: Path, gap_run: Path) -> None:
    def wrong(path: str, run: Path = digits_run, **options: Any) -> str:
        return refused("evaluate", run, "--attack-set", path, **options)

    assert "There is no file nowhere.safetensors" in wrong("nowhere.safetensors")
    assert "is not an attack set" in wrong(str(digits_run / "model.safetensors"))
    Path("text.safetensors").write_text("hello")
    assert "not a complete safetensors file" in wrong("text.safetensors")
    write_set("flat.safetensors", torch.rand(5, 64), torch.arange(5))
    assert "holds inputs of shape (64,), the run was trained on (1, 8, 8)" in wrong("flat.safetensors")
    write_set("labels.safetensors", torch.rand(5, 1, 8, 8), torch.arange(7, 12))
    assert "has labels up to 11, the run has 10 classes" in wrong("labels.safetensors")
    assert "this run is a regression" in wrong("flat.safetensors", gap_run)
    assert not Path("evaluation.json").exists()
