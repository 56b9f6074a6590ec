"""A disk that is full: said clearly, with the old file as it was and nothing half-written left."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import credo
from credo.core.support.files import DiskFullError, write_atomically, write_text
from credo.training.files.checkpoint import load_checkpoint, save_checkpoint


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "tiny"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs rights")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_checkpoint_that_does_not_fit(tiny: Path) -> None:
    path = tiny / "c.pt"
    save_checkpoint(path, {"weights": torch.zeros(1000)}, keep=2)
    with pytest.raises(
        DiskFullError,
        match=r"No space is left to write .*c\.pt: .* KiB are free in .*The old file \(5.* KiB\) is unchanged",
    ):
        save_checkpoint(path, {"weights": torch.randn(10**6)}, keep=2)
    assert [entry.name for entry in tiny.iterdir()] == ["c.pt"]
    assert torch.equal(load_checkpoint(path)["weights"], torch.zeros(1000))


@pytest.mark.parametrize("what", ["text", "tensors"])
def test_other_files_that_do_not_fit(what: str, tiny: Path) -> None:
    def write(file: Path) -> None:
        file.write_text("x" * 2**21) if what == "text" else save_file({"a": torch.randn(10**6)}, file)

    with pytest.raises(DiskFullError, match="No part of it was left behind"):
        write_atomically(tiny / "file", write)
    assert list(tiny.iterdir()) == []


def test_training_stops_and_the_checkpoint_before_is_whole(tiny: Path) -> None:
    batches = [(torch.randn(4, 3), torch.randint(2, (4,)))] * 3

    def posterior() -> credo.MAP:
        torch.manual_seed(0)
        return credo.MAP(torch.nn.Linear(3, 2), data_size=12)

    def fill(epoch: int, *call: Any) -> None:
        if epoch == 2:
            (tiny / "others").write_bytes(b"x" * shutil.disk_usage(tiny).free)

    with pytest.raises(DiskFullError, match=r"c\.pt"):
        list(credo.train(posterior(), batches, epochs=3, checkpoint=tiny / "c.pt", on_step=fill))
    assert load_checkpoint(tiny / "c.pt")["progress"]["epoch"] == 1
    (tiny / "others").unlink()
    assert len(list(credo.train(posterior(), batches, epochs=3, checkpoint=tiny / "c.pt"))) == 3


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("old", [True, False])
def test_what_the_system_says_while_writing(
    code: int, old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.txt"
    if old:
        write_text(path, "old")

    def full(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFullError, match="is unchanged" if old else "No part of it") as error:
            write_text(path, "new")
    assert isinstance(error.value, OSError)
    assert "Free some space and start again" in str(error.value)
    assert [entry.name for entry in tmp_path.iterdir()] == (["file.txt"] if old else [])
    assert not old or path.read_text() == "old"


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken") as error:
        write_atomically(tmp_path / "file", write)
    assert not isinstance(error.value, DiskFullError)
