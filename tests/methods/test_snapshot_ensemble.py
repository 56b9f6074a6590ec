"""`Ensemble.from_checkpoints`: the states that one training went through, as members."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo

X = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
BATCHES = [(X[:8], Y[:8]), (X[8:], Y[8:])]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def build(**options: Any) -> credo.Posterior:
    return credo.MAP(network(), data_size=16, lr=0.1, **options)


def trained(path: Path, epochs: int = 5, keep: int = 3) -> list[dict[str, Tensor]]:
    """The states after each epoch of a training with these checkpoints."""
    posterior, states = build(), []
    for _ in credo.train(posterior, BATCHES, epochs=epochs, checkpoint=path, keep=keep, schedule=cycle):
        states.append({name: tensor.clone() for name, tensor in posterior.model.state_dict().items()})
    return states


def cycle(time: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * (time % 1)))


def assert_members(ensemble: credo.Ensemble, states: list[dict[str, Tensor]]) -> None:
    assert len(ensemble.parts) == len(states)
    for part, state in zip(ensemble.parts, states, strict=True):
        for name, tensor in part.model.state_dict().items():
            assert torch.equal(tensor, state[name]), name


def test_a_checkpoint_stands_for_the_older_ones_too(tmp_path: Path) -> None:
    states = trained(tmp_path / "c.pt")
    ensemble = credo.Ensemble.from_checkpoints(tmp_path / "c.pt", build)
    assert_members(ensemble, states[:1:-1])
    assert not ensemble.training
    single = [credo.predict(part, X).probs for part in ensemble.parts]
    prediction = credo.predict(ensemble, X)
    torch.testing.assert_close(prediction.probs, torch.stack(single).mean(0))
    assert prediction.epistemic.max() > 0


def test_a_folder_and_a_list(tmp_path: Path) -> None:
    states = trained(tmp_path / "c.pt", keep=2)
    assert_members(credo.Ensemble.from_checkpoints(str(tmp_path), build), states[:2:-1])
    assert_members(credo.Ensemble.from_checkpoints([tmp_path / "c.1.pt"], build), states[3:4])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        credo.Ensemble.from_checkpoints(tmp_path / "empty", build)
    with pytest.raises(FileNotFoundError, match=r"no file .*other\.pt"):
        credo.Ensemble.from_checkpoints(tmp_path / "other.pt", build)
    with pytest.raises(ValueError, match="at least one member"):
        credo.Ensemble.from_checkpoints([], build)


def test_members_of_other_methods(tmp_path: Path) -> None:
    def swag() -> credo.Posterior:
        return credo.SWAG(nn.Linear(3, 2), data_size=16, rank=2, start=0, every=1)

    credo.fit(swag(), BATCHES, epochs=3, checkpoint=tmp_path / "c.pt", keep=2, progress=False)
    ensemble = credo.Ensemble.from_checkpoints(tmp_path, swag)
    assert [part.collected for part in ensemble.parts] == [6, 4]
    assert ensemble.is_random


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    trained(path, epochs=1)
    for other, message in (
        (lambda: credo.BBB(network(), data_size=16), "does not fit: missing"),
        (lambda: credo.MAP(network().double(), data_size=16), "another dtype of model"),
        (lambda: credo.MAP(nn.Linear(3, 2), data_size=16), "does not fit"),
    ):
        with pytest.raises(credo.FileFormatError, match=message):
            credo.Ensemble.from_checkpoints(path, other)
    saved = credo.save(build(), tmp_path / "p.safetensors")
    with pytest.raises(credo.FileFormatError, match=r"read it with credo\.load"):
        credo.Ensemble.from_checkpoints([saved], build)
    torch.save({"weights": torch.ones(2)}, tmp_path / "mine.pt")
    with pytest.raises(credo.FileFormatError, match="not a checkpoint"):
        credo.Ensemble.from_checkpoints([tmp_path / "mine.pt"], build)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(credo.FileFormatError, match="not a complete file"):
        credo.Ensemble.from_checkpoints([path], build)


def test_a_checkpoint_with_nan(tmp_path: Path) -> None:
    trained(tmp_path / "c.pt", epochs=1)
    content = torch.load(tmp_path / "c.pt", weights_only=True)
    content["posterior"]["model.0.bias"][0] = math.nan
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(credo.FileFormatError, match=r"model\.0\.bias holds NaN"):
        credo.Ensemble.from_checkpoints(tmp_path / "c.pt", build)
