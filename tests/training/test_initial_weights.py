"""Where a network starts: saved posteriors, public weights, and a part of the data."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from credo import (
    BBB,
    MAP,
    CredoWarning,
    Ensemble,
    FileFormatError,
    Posterior,
    UnsupportedModelError,
    calibrate,
    load,
    save,
)
from credo.experiments.config import Experiment, make_experiment, prepare
from credo.experiments.runs import Run
from credo.models import build_model
from credo.training.initial_weights import load_weights_, normalize_of


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


def foreign(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))


def mlp(**options: object) -> torch.nn.Module:
    return build_model("mlp", inputs=[1, 8, 8], classes=10, hidden=[100], **options)


@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_a_state_dict_of_another_network_is_taken_in_order(suffix: str, tmp_path: Path) -> None:
    theirs, path, x = foreign(), tmp_path / f"theirs{suffix}", torch.randn(5, 1, 8, 8)
    torch.save({"state_dict": theirs.state_dict()} if suffix == ".pth" else theirs.state_dict(), path)
    ours = mlp(normalize=None)
    with pytest.warns(CredoWarning, match=r"other names than the network \(1\.weight, not fc1\.weight\)"):
        load_weights_(ours, str(path), "mlp")
    assert torch.equal(ours(x), theirs(x))
    assert normalize_of(str(path), "mlp") is None


def test_safetensors_of_others_are_taken_by_name(tmp_path: Path) -> None:
    theirs, ours = mlp(normalize=None, seed=1), mlp(normalize=None)
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    load_weights_(ours, str(tmp_path / "theirs.safetensors"), "mlp")
    assert torch.equal(ours.fc2.weight, theirs.fc2.weight)
    assert normalize_of(str(tmp_path / "theirs.safetensors"), "mlp") == [0.0, 1.0]
    scaled = mlp(normalize=[[0.5], [2.0]])
    torch.save(scaled.state_dict(), tmp_path / "scaled.pt")
    again = mlp(normalize=normalize_of(str(tmp_path / "scaled.pt"), "mlp"))
    load_weights_(again, str(tmp_path / "scaled.pt"), "mlp")
    x = torch.randn(5, 1, 8, 8)
    assert torch.equal(again(x), scaled(x))


def test_a_state_dict_leaves_the_scaling_of_inputs(tmp_path: Path) -> None:
    trained = foreign()
    torch.save(trained.state_dict(), tmp_path / "a.pt")
    ours = mlp(normalize=[[0.5], [2.0]])
    with pytest.warns(CredoWarning, match="taken in order"):
        load_weights_(ours, str(tmp_path / "a.pt"), "mlp")
    x = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(ours(x), trained((x - 0.5) / 2))


def test_a_file_that_holds_no_fitting_state_dict(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(FileFormatError, match=r"holds no state_dict: write one with torch\.save"):
        load_weights_(mlp(), str(tmp_path / "a.pt"), "mlp")
    torch.save(foreign().state_dict(), tmp_path / "b.pt")
    with pytest.raises(FileFormatError, match=r"is of another network: 1\.bias"):
        load_weights_(build_model("mlp", inputs=[1, 8, 8], classes=10, hidden=[50]), str(tmp_path / "b.pt"), "mlp")
    torch.save(foreign(), tmp_path / "code.pt")  # a pickled module would run code
    with pytest.raises(FileFormatError, match=r"is not a complete file of torch\.save"):
        load_weights_(mlp(), str(tmp_path / "code.pt"), "mlp")


def test_no_epoch_leaves_the_weights_and_makes_the_pass(tmp_path: Path) -> None:
    """The run has the network's own weights, the curvature of a pass, and a calibration of the linearised network."""
    torch.save(foreign().state_dict(), tmp_path / "theirs.pt")
    tables = {
        "model": {"hidden": [100], "weights": str(tmp_path / "theirs.pt")},
        "method": {"name": "laplace"},
        "training": {"epochs": 0, "calibrate": True},
    }
    run = Run(tmp_path / "run")
    with pytest.warns(CredoWarning, match="other names"):
        assert list(run.train(make_experiment(tables))) == []
    posterior = load(tmp_path / "run" / "model.safetensors")
    assert torch.equal(posterior.model.fc2.weight, foreign()[3].weight)
    assert posterior.has_curvature
    assert posterior.calibration is not None
    wanted = prepared_laplace(make_experiment(tables))
    assert posterior.calibration.temperature == pytest.approx(wanted.calibration.temperature, rel=1e-4)


def prepared_laplace(experiment: Experiment) -> Posterior:
    """What the run should be: a pass, then a calibration."""
    with pytest.warns(CredoWarning, match="other names"):
        prepared = prepare(experiment)
    prepared.posterior.fit(prepared.loader, progress=False)
    return calibrate(prepared.posterior, prepared.validation, progress=False)
