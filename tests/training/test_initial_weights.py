"""Where a network starts: saved posteriors, public weights, and a part of the data."""

from pathlib import Path

import pytest
import torch

from credo import BBB, MAP, Ensemble, FileFormatError, UnsupportedModelError, save
from credo.experiments.config import make_experiment, prepare
from credo.models import build_model
from credo.training.initial_weights import load_weights_


def convnet() -> torch.nn.Module:
    return build_model("convnet", inputs=[1, 8, 8], classes=10, channels=[4], hidden=[8], batch_norm=True)


def test_a_saved_posterior_gives_means_and_running_statistics(tmp_path: Path) -> None:
    trained = BBB(convnet(), data_size=10, init=0.1)
    for name, buffer in trained.model.named_buffers():
        if name.endswith("running_mean"):
            buffer.fill_(0.25)
    save(trained, tmp_path / "model.safetensors")
    for where in (tmp_path, tmp_path / "model.safetensors"):
        fresh = convnet()
        load_weights_(fresh, str(where), "convnet")
        for name, tensor in trained.model.state_dict().items():
            assert torch.equal(fresh.state_dict()[name], tensor), name


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(MAP(convnet(), data_size=10), path)
    wider = build_model("convnet", inputs=[1, 8, 8], classes=10, channels=[6], hidden=[8], batch_norm=True)
    with pytest.raises(FileFormatError, match="is of another network"):
        load_weights_(wider, str(path), "convnet")
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere\. Give the folder of a finished run"):
        load_weights_(convnet(), str(tmp_path / "nowhere"), "convnet")
    save(Ensemble([MAP(convnet(), data_size=10) for _ in range(2)]), tmp_path / "e.safetensors")
    with pytest.raises(UnsupportedModelError, match="is an ensemble"):
        load_weights_(convnet(), str(tmp_path / "e.safetensors"), "convnet")


def test_public_weights_say_where_to_put_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDO_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="resnet20 and resnet56, not for lenet5"):
        load_weights_(convnet(), "public", "lenet5")
    with pytest.raises(FileNotFoundError, match=r"weights.resnet20-cifar10\.safetensors: put the weights of github"):
        load_weights_(convnet(), "public", "resnet20")


def test_training_on_part_of_the_data() -> None:
    tables = {"training": {"examples": 200, "validation": 100, "seed": 3}}
    prepared = prepare(make_experiment(tables))
    counts = prepared.loader.split.y.bincount()
    assert counts.sum() == 200 == prepared.posterior.data_size
    assert counts.min() >= 18, "every class at its share"
    again = prepare(make_experiment(tables))
    assert torch.equal(again.loader.split.y, prepared.loader.split.y)
    with pytest.raises(ValueError, match=r"training\.examples=99999: only 1294 are"):
        prepare(make_experiment({"training": {"examples": 99999}}))
