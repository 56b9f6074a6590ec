"""Studies of corrupted images: the numbers are those of a plain loop, and means are means."""

from statistics import fmean

import pytest
import torch

import credo
from credo.data import Batches, Split, corrupt, load_dataset
from credo.evaluate import ece, nll
from credo.experiments.config import in_order
from credo.experiments.corruption_study import shift_rows, shift_run, shift_study
from credo.experiments.runs import Run
from credo.models import build_model


@pytest.fixture(scope="module")
def posterior() -> credo.Posterior:
    digits = load_dataset("digits")
    model = build_model("mlp", inputs=digits.input_shape, hidden=[16], seed=0)
    found = credo.MAP(model, data_size=len(digits.train), lr=0.01)
    loader = [(digits.train.x, digits.train.y)]
    return credo.fit(found, loader, epochs=60, progress=False)


def test_numbers_are_those_of_a_plain_loop(posterior: credo.Posterior) -> None:
    test = load_dataset("digits").test
    seen: list[tuple[str, int]] = []
    kinds = ("gaussian-noise", "contrast")
    found = shift_study(
        posterior, test, kinds=kinds, severities=(1, 5), seed=3, on_kind=lambda *at: seen.append(at), bins=10
    )
    assert seen == [(kind, severity) for kind in kinds for severity in (1, 5)]
    for kind in kinds:
        for severity in (1, 5):
            with torch.no_grad():
                probs = posterior.model.eval()(corrupt(test.x, kind, severity, seed=3)).softmax(1)
            expected = {
                "accuracy": (probs.argmax(1) == test.y).double().mean().item(),
                "nll": nll(probs, test.y),
                "ece": ece(probs, test.y, bins=10),
            }
            assert found["kinds"][kind][str(severity)] == pytest.approx(expected, rel=1e-4)
    for name in ("accuracy", "nll", "ece"):
        for severity in ("1", "5"):
            mean = fmean(found["kinds"][kind][severity][name] for kind in kinds)
            assert found["severities"][severity][name] == pytest.approx(mean)
        assert found["mean"][name] == pytest.approx(fmean(found["severities"][s][name] for s in ("1", "5")))
    assert found["clean"]["accuracy"] > found["severities"]["5"]["accuracy"]
    rows = shift_rows(found)
    assert [row[0] for row in rows] == ["none", "1", "5", "mean of 1 to 5"]
    assert rows[0][1:] == [found["clean"][name] for name in ("accuracy", "nll", "ece")]


def test_a_part_of_the_examples_has_every_class(posterior: credo.Posterior, monkeypatch: pytest.MonkeyPatch) -> None:
    test = load_dataset("digits").test
    measured: list[Split] = []

    def recorded(part: Split) -> Batches:
        measured.append(part)
        return in_order(part)

    monkeypatch.setattr("credo.experiments.corruption_study.in_order", recorded)
    found = shift_study(posterior, test, kinds=("fog",), severities=(2,), examples=50)
    assert found["examples"] == 50
    foggy, clean = measured
    # The 359 digits have 35 to 37 of each class; 50 drawn without regard to it would have 1 to 6.
    assert clean.y.bincount().tolist() == [5] * 10
    assert torch.equal(foggy.y, clean.y)
    assert torch.equal(foggy.x, corrupt(clean.x, "fog", 2)), "the same examples for every kind"
    assert found == shift_study(posterior, test, kinds=("fog",), severities=(2,), examples=50)
    assert shift_study(posterior, test, kinds=("fog",), severities=(2,), examples=9999)["examples"] == len(test)


def test_a_run(small, tmp_path) -> None:
    experiment = small(data={"name": "digits"}, method={"name": "node-bnn", "components": 2}, training={"epochs": 1})
    run = Run(tmp_path / "run")
    for _ in run.train(experiment, draws=2):
        pass
    found = shift_run(run, kinds="fog,jpeg", examples=30, draws=2)
    assert set(found["kinds"]) == {"fog", "jpeg"}
    assert list(found["severities"]) == ["1", "2", "3", "4", "5"]
    with pytest.raises(ValueError, match="changes colours"):
        shift_run(run, kinds="saturate")


def test_what_is_no_image_is_refused(small, tmp_path) -> None:
    run = Run(tmp_path / "run")
    for _ in run.train(small(training={"epochs": 1}), draws=2):
        pass
    with pytest.raises(ValueError, match=r"blobs has inputs \(2,\)\."):
        shift_run(run)


def test_a_split_of_bytes() -> None:
    images = Split(torch.randint(256, (12, 3, 8, 8), dtype=torch.uint8), torch.arange(12) % 2)
    model = build_model("mlp", inputs=(3, 8, 8), classes=2, hidden=[4], seed=0)
    found = shift_study(credo.MAP(model, data_size=12), images, kinds=("saturate", "jpeg"), severities=(1,))
    assert 0 <= found["mean"]["accuracy"] <= 1
