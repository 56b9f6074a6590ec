"""Sets of labels and of classes at pixels that a posterior keeps: predictions, metrics, files."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.core.held_out.conformal import conformal_from


def label_posterior() -> credo.BBB:
    torch.manual_seed(0)
    return credo.BBB(nn.Linear(4, 3), data_size=100, likelihood="multi-label")


def label_rows(count: int) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return [(x, (x[:, :3] > 0).float())]


def pixel_posterior() -> credo.BBB:
    torch.manual_seed(0)
    likelihood = credo.likelihoods.Categorical(class_dim=-3, ignore_index=255)
    return credo.BBB(nn.Conv2d(2, 3, 1), data_size=100, likelihood=likelihood)


def pixel_rows(count: int) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(count, 2, 4, 4, generator=torch.Generator().manual_seed(count))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    y[:, 0] = 255
    return [(x, y)]


@pytest.mark.parametrize("what", ["labels", "pixels"])
def test_predictions_files_and_metrics_have_the_sets(what: str, tmp_path: Path) -> None:
    posterior, rows = (label_posterior(), label_rows) if what == "labels" else (pixel_posterior(), pixel_rows)
    found = credo.conformal(posterior, rows(300), 0.1, confidence=0.9)
    assert isinstance(found, credo.RiskControlledSets)
    assert posterior.conformal == found
    assert "at most 10 % of a row's true labels missed with confidence 90 %, from 3" in repr(found).replace(
        "from 2", "from 3"
    )
    prediction = credo.predict(posterior, rows(200))
    assert torch.equal(prediction.sets, prediction.probs >= found.thresholds[0])
    measured = credo.measure(prediction)["conformal"]
    assert measured["fnr"] <= 0.14
    assert len(measured["fnr_by_class"]) == 3
    assert "sets" in repr(prediction)
    assert str(prediction)
    again = credo.load(
        credo.save(posterior, tmp_path / "model.safetensors"),
        model=nn.Linear(4, 3) if what == "labels" else nn.Conv2d(2, 3, 1),
    )
    assert again.conformal == found
    assert conformal_from(found.to_dict()) == found
    assert bool(credo.predictor(posterior)(rows(200)[0][0]).sets.any())


def test_ignored_pixels_do_not_count() -> None:
    posterior = pixel_posterior()
    ((x, y),) = pixel_rows(100)
    other = y.clone()
    assert (other[:, 0] == 255).all()
    prediction = credo.predict(posterior, [(x, y)])
    found = credo.conformal(prediction, alpha=0.2)
    arrays = credo.conformal(prediction.probs[:, 1:], y[:, 1:], 0.2, "fnr")
    assert found == arrays
    assert credo.conformal(prediction.probs, y, 0.2, "fnr", ignore_index=255) == found


def test_other_kinds_are_named() -> None:
    prediction = credo.predict(label_posterior(), label_rows(50))
    with pytest.raises(ValueError, match="Possible: fnr"):
        credo.conformal(prediction, kind="lac")


@pytest.mark.parametrize(
    "change", [{"thresholds": [1.5]}, {"classes": [7]}, {"classes": []}, {"confidence": 2.0}, {"outputs": 0}]
)
def test_damaged_files_are_refused(change: dict[str, object]) -> None:
    ((x, y),) = label_rows(50)
    whole = credo.conformal(x[:, :3].sigmoid(), y, 0.1, "fnr").to_dict()
    with pytest.raises(ValueError):
        conformal_from({**whole, **change})
