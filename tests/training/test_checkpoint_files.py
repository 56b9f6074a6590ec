"""Checkpoint files: refused unless complete and of the same run; nothing in them is ever run."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import credo
from credo.training.files.checkpoint import load_checkpoint, save_checkpoint

STATE: dict[str, Any] = {
    "fingerprint": {"seed": 0, "posterior": {"options": {"lr": 0.1, "betas": [0.9, 0.99]}}},
    "weights": torch.arange(300.0),
    "nested": {"list": [1, 2.5, None, "text", torch.ones(2, dtype=torch.int64)]},
}


class Malicious:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_round_trip(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c.pt", STATE)
    state = load_checkpoint(tmp_path / "c.pt", fingerprint=STATE["fingerprint"])
    assert torch.equal(state["weights"], STATE["weights"])
    assert state["nested"]["list"][:4] == [1, 2.5, None, "text"]
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


def test_truncated_at_any_length(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    save_checkpoint(path, STATE)
    whole = path.read_bytes()
    for length in [*range(40), *range(40, len(whole), 37), *range(len(whole) - 30, len(whole))]:
        path.write_bytes(whole[:length])
        with pytest.raises(credo.FileFormatError, match="not a complete checkpoint"):
            load_checkpoint(path)


def test_flipped_bytes_are_noticed_or_harmless(tmp_path: Path) -> None:
    """Checksums cover all that is read; the padding between the records may change without harm."""
    path = tmp_path / "c.pt"
    save_checkpoint(path, STATE)
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 13):
        changed = bytearray(whole)
        changed[place] ^= 0x55
        path.write_bytes(changed)
        try:
            state = load_checkpoint(path, fingerprint=STATE["fingerprint"])
        except credo.FileFormatError:
            refused += 1
            continue
        assert torch.equal(state["weights"], STATE["weights"])
        assert state["nested"]["list"][:4] == [1, 2.5, None, "text"]
    assert refused > 50


@pytest.mark.parametrize(
    "content", [b"", b"not a checkpoint", b"PK\x03\x04" + bytes(100), bytes(1000), b"\x80\x04K\x01."]
)
def test_foreign_bytes(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "c.pt").write_bytes(content)
    with pytest.raises(credo.FileFormatError):
        load_checkpoint(tmp_path / "c.pt")


@pytest.mark.parametrize("value", [torch.ones(3), [1, 2], {"a": 1}, {"format": 99}, {"format": "1"}])
def test_other_formats(value: Any, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "c.pt")
    with pytest.raises(credo.FileFormatError, match="this version reads 1, 2, 3"):
        load_checkpoint(tmp_path / "c.pt")


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_malicious_files_run_nothing(how: str, tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    if how == "torch":
        torch.save({"format": 1, "x": Malicious(trap)}, tmp_path / "c.pt")
    else:
        (tmp_path / "c.pt").write_bytes(pickle.dumps({"format": 1, "x": Malicious(trap)}))
    with pytest.raises(credo.FileFormatError):
        load_checkpoint(tmp_path / "c.pt")
    assert not trap.exists()
    pickle.loads(pickle.dumps(Malicious(trap)))  # the trap itself works
    assert trap.exists()


def test_other_settings_are_named_one_by_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c.pt", STATE)
    other = {"seed": 1, "posterior": {"options": {"lr": 0.2, "betas": [0.9, 0.99]}}}
    with pytest.raises(credo.FileFormatError) as error:
        load_checkpoint(tmp_path / "c.pt", fingerprint=other)
    assert "posterior.options.lr: 0.1 there, 0.2 now" in str(error.value)
    assert "seed: 0 there, 1 now" in str(error.value)
    assert "betas" not in str(error.value)


def test_a_failing_write_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    save_checkpoint(path, STATE)
    before = path.read_bytes()
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save_checkpoint(path, {"weights": torch.zeros(1000), "bad": lambda: None})
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.pt"]


# -- which runs a checkpoint fits ----------------------------------------------------------------------------

BATCHES = [(torch.randn(4, 3), torch.randint(2, (4,)))] * 2


def network(hidden: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 2))


def ensemble(lr: float = 0.1, members: int = 2) -> credo.Ensemble:
    return credo.Ensemble([credo.MAP(network(), data_size=8, lr=lr, seed=s) for s in range(members)])


CHANGES: dict[str, Any] = {
    "lr": lambda: credo.BBB(network(), data_size=8, lr=0.2),
    "prior": lambda: credo.BBB(network(), data_size=8, lr=0.1, prior=0.5),
    "data_size": lambda: credo.BBB(network(), data_size=9, lr=0.1),
    "network": lambda: credo.BBB(network(6), data_size=8, lr=0.1),
    "method": lambda: credo.MAP(network(), data_size=8, lr=0.1),
    "temperature": lambda: credo.BBB(network(), data_size=8, lr=0.1, temperature=0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_with_other_settings_is_refused_untouched(change: str, tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    list(credo.train(credo.BBB(network(), data_size=8, lr=0.1), BATCHES, epochs=1, checkpoint=path))
    other = CHANGES[change]()
    before = {name: p.clone() for name, p in other.named_parameters()}
    with pytest.raises(credo.FileFormatError, match=change):
        list(credo.train(other, BATCHES, epochs=2, checkpoint=path))
    assert all(torch.equal(p, before[name]) for name, p in other.named_parameters())


def test_settings_of_the_members_of_an_ensemble_count(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    list(credo.train(ensemble(), BATCHES, epochs=1, checkpoint=path))
    with pytest.raises(credo.FileFormatError, match=r"members\.0\.options\.lr"):
        list(credo.train(ensemble(lr=0.2), BATCHES, epochs=2, checkpoint=path))
    with pytest.raises(credo.FileFormatError, match=r"members\.2"):
        list(credo.train(ensemble(members=3), BATCHES, epochs=2, checkpoint=path))
    assert len(list(credo.train(ensemble(), BATCHES, epochs=2, checkpoint=path))) == 2


def test_seed_and_number_of_batches_count(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    list(credo.train(ensemble(), BATCHES, epochs=1, checkpoint=path))
    with pytest.raises(credo.FileFormatError, match="seed: 0 there, 3 now"):
        list(credo.train(ensemble(), BATCHES, epochs=2, checkpoint=path, seed=3))
    with pytest.raises(credo.FileFormatError, match="batches: 2 there, 1 now"):
        list(credo.train(ensemble(), BATCHES[:1], epochs=2, checkpoint=path))
