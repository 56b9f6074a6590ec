"""Weights from files of others: taken whole, or an error that names the file and a model as it was."""

import io
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import credo
from credo.models import load_named_weights


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.fixture(params=["w.pt", "w.safetensors"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write(network(), tmp_path / request.param)
    return tmp_path / request.param


def write(model: nn.Module, path: Path) -> None:
    if path.suffix == ".pt":
        torch.save(model.state_dict(), path)
    else:
        save_file(model.state_dict(), path)


def loaded_or_named(path: Path) -> bool:
    """Whether it is loaded; the only other way to end is an error that names the file, and nothing is changed."""
    model = network()
    with torch.no_grad():
        model[0].weight.zero_()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    message = ""
    try:
        load_named_weights(model, path)
    except credo.FileFormatError as error:
        message = str(error)
    if not message:
        return True
    assert str(path) in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return False


def test_a_truncated_file_is_an_error_that_names_it(path: Path) -> None:
    whole = path.read_bytes()
    assert loaded_or_named(path)
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        assert not loaded_or_named(path)


def test_a_changed_file_of_torch_never_gives_other_weights(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    write(network(), path)
    whole, wanted = path.read_bytes(), network().state_dict()
    generator = random.Random(0)
    for _ in range(60):
        changed = bytearray(whole)
        changed[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        if not loaded_or_named(path):
            continue
        model = network()
        load_named_weights(model, path)  # a byte that means nothing, of the padding say
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_a_changed_header_of_safetensors_is_an_error_or_the_same(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write(network(), path)
    whole = path.read_bytes()
    for place in range(0, int.from_bytes(whole[:8], "little"), 7):
        changed = bytearray(whole)
        changed[place] ^= 0x41
        path.write_bytes(changed)
        loaded_or_named(path)


def test_a_compressed_archive_is_not_unpacked(tmp_path: Path) -> None:
    write(network(), tmp_path / "w.pt")
    with (
        zipfile.ZipFile(tmp_path / "w.pt") as old,
        zipfile.ZipFile(tmp_path / "c.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.namelist():
            new.writestr(entry, old.read(entry))
    with pytest.raises(credo.FileFormatError, match=r"c\.pt is not .* it is compressed"):
        load_named_weights(network(), tmp_path / "c.pt")


@pytest.mark.parametrize(
    "content",
    [b"", b"junk", pickle.dumps({"a": 1}), pickle.dumps(os.getcwd), b"\x80\x02" + b"(" * 10_000],
    ids=["empty", "junk", "plain pickle", "a function", "deep"],
)
def test_other_files_are_errors_that_name_them(content: bytes, tmp_path: Path) -> None:
    for name in ("w.pt", "w.safetensors"):
        (tmp_path / name).write_bytes(content)
        assert not loaded_or_named(tmp_path / name)


@pytest.mark.parametrize(
    "change",
    [
        {"0.weight": torch.ones(4, 3, dtype=torch.int64)},
        {"0.weight": torch.ones(4, 3, dtype=torch.complex64)},
        {"0.weight": torch.ones(4, 3).to_sparse()},
        {"0.weight": [1.0]},
        {7: torch.ones(1)},
    ],
    ids=["whole numbers", "complex", "sparse", "a list", "a number as name"],
)
def test_tensors_of_another_kind_are_not_converted(change: dict[Any, Any], tmp_path: Path) -> None:
    torch.save({**network().state_dict(), **change}, tmp_path / "w.pt")
    assert not loaded_or_named(tmp_path / "w.pt")


def test_files_from_before_the_archives_are_read(tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save(network().state_dict(), content, _use_new_zipfile_serialization=False)
    (tmp_path / "w.pt").write_bytes(content.getvalue())
    assert loaded_or_named(tmp_path / "w.pt")


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    for name in ("w.pt", "w.safetensors"):
        os.mkfifo(tmp_path / name)
        assert not loaded_or_named(tmp_path / name)
