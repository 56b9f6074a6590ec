"""Damaged, foreign and hostile files: always a clear error, never a wrong load, and nothing in a file is run."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forged_files import forge, joined, split
from safetensors.torch import save_file
from torch import nn

import credo
from credo.models import build_model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    network = build_model("mlp", inputs=(3,), classes=2, hidden=(4,), seed=0)
    return credo.save(credo.BBB(network, data_size=10, temperature=1.0), tmp_path / "p.safetensors")


def test_the_forger_itself_works(path: Path) -> None:
    forge(path, lambda about: about["extra"].update(note="changed"))
    assert credo.describe(path)["extra"] == {"note": "changed"}
    credo.load(path)


def test_truncated_at_any_length(path: Path) -> None:
    whole = path.read_bytes()
    for length in [*range(20), *range(20, len(whole), 41), *range(len(whole) - 20, len(whole))]:
        path.write_bytes(whole[:length])
        for read in (credo.load, credo.describe):
            with pytest.raises(credo.FileFormatError, match=r"p\.safetensors"):
                read(path)


def test_longer_than_it_should_be(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(credo.FileFormatError):
        credo.load(path)


@pytest.mark.parametrize("mask", [0x01, 0x10, 0xFF])
def test_any_flipped_byte_is_noticed(mask: int, path: Path) -> None:
    """Size, description, names, offsets, padding and data: every tenth byte, never a load that is wrong."""
    whole = path.read_bytes()
    for place in [*range(8), *range(8, len(whole), 10)]:
        changed = bytearray(whole)
        changed[place] ^= mask
        path.write_bytes(changed)
        with pytest.raises(credo.FileFormatError, match=r"p\.safetensors"):
            credo.load(path)


def test_a_swap_of_two_equal_tensors_by_name_is_noticed(path: Path) -> None:
    """Valid safetensors, valid JSON, the same bytes: only the digest can tell."""
    header, data = split(path.read_bytes())
    names = [name for name in header if name.endswith("bias")]
    header[names[0]], header[names[1]] = header[names[1]], header[names[0]]
    path.write_bytes(joined(header, data))
    with pytest.raises(credo.FileFormatError, match=r"digest|fit"):
        credo.load(path)


def test_a_changed_description_is_noticed(path: Path) -> None:
    raw = path.read_bytes()
    assert raw.count(b'\\"temperature\\": 1.0') == 1
    path.write_bytes(raw.replace(b'\\"temperature\\": 1.0', b'\\"temperature\\": 9.0'))
    with pytest.raises(credo.FileFormatError, match="digest does not match"):
        credo.load(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"credo": "{not json"}, {"credo": "[1, 2]"}])
def test_foreign_safetensors(metadata: dict[str, str] | None, path: Path) -> None:
    save_file({"weight": torch.ones(3)}, path, metadata=metadata)
    with pytest.raises(credo.FileFormatError, match="description"):
        credo.load(path)


@pytest.mark.parametrize("version", [0, 4, "1", None])
def test_another_format_version(version: Any, path: Path) -> None:
    forge(path, lambda about: about.update(format=version))
    with pytest.raises(credo.FileFormatError, match="this version reads 1"):
        credo.load(path)


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no posterior": lambda about: about.pop("posterior"),
    "no architecture": lambda about: about.pop("architecture") and None,
    "unknown method": lambda about: about["posterior"].update(method="bbbb"),
    "unknown option": lambda about: about["posterior"]["options"].update(colour="red"),
    "options of another type": lambda about: about["posterior"].update(options=[1]),
    "unknown model": lambda about: about["architecture"]["spec"].update(name="mlpp"),
    "unknown precision": lambda about: about["architecture"]["dtypes"].update(
        dict.fromkeys(about["architecture"]["dtypes"], "float99")
    ),
    "no data size": lambda about: about["posterior"].update(data_size=-1),
    "fewer random parameters": lambda about: about["posterior"]["options"].update(random="last"),
    "another prior": lambda about: about["posterior"]["options"].update(
        prior={"kind": "gaussian", "std": {"entries": 3}}
    ),
    "members of nothing": lambda about: about["posterior"].update(members=[]),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_descriptions_that_cannot_be(forgery: str, path: Path) -> None:
    forge(path, lambda about: FORGERIES[forgery](about) and None)
    with pytest.raises(ValueError):  # FileFormatError is one
        credo.load(path)


def test_another_architecture_names_the_first_differences(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self, hidden: int, extra: int = 0) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, hidden), nn.Linear(hidden, 2)
            self.more = nn.ModuleList(nn.Linear(2, 2) for _ in range(extra))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))

    path = credo.save(credo.MAP(Own(4), data_size=10), tmp_path / "p.safetensors")
    with pytest.raises(credo.FileFormatError) as error:
        credo.load(path, model=Own(5))
    assert "first.bias: [4] in the file, [5] in the network" in str(error.value)
    assert "first.weight: [4, 3] in the file, [5, 3] in the network" in str(error.value)
    with pytest.raises(
        credo.FileFormatError, match=r"more\.0\.bias: absent in the file, \[2\] in the network.*and 3 more"
    ):
        credo.load(path, model=Own(4, extra=4))
    with pytest.raises(ValueError, match=r"class Own, which is not Credo's: pass model="):
        credo.load(path)
    before = Own(5)
    kept = {name: p.clone() for name, p in before.named_parameters()}
    with pytest.raises(credo.FileFormatError):
        credo.load(path, model=before)
    assert all(torch.equal(p, kept[name]) for name, p in before.named_parameters())


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
        credo.load(tmp_path / "nothing.safetensors")
    with pytest.raises((credo.FileFormatError, OSError)):
        credo.load(tmp_path)


class Malicious:
    """Unpickled, it would leave a folder behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_pickle_in_disguise_runs_nothing(how: str, tmp_path: Path) -> None:
    trap, path = tmp_path / "ran", tmp_path / "p.safetensors"
    if how == "pickle":
        path.write_bytes(pickle.dumps(Malicious(trap)))
    else:
        torch.save({"x": Malicious(trap)}, path)
    for read in (credo.load, credo.describe):
        with pytest.raises(credo.FileFormatError, match="not a complete safetensors file"):
            read(path)
    assert not trap.exists()


def test_a_failing_save_keeps_the_old_file(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(TypeError):
        credo.save(credo.load(path), path, extra={"not json": object()})
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_failing_disk_keeps_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, before = credo.load(path), path.read_bytes()

    def full(tensors: Any, target: Path, metadata: Any = None) -> None:
        target.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("credo.core.support.tensor_files.save_file", full)
    with pytest.raises(OSError, match="no space left"):
        credo.save(posterior, path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
