"""A training that goes on with other kernels than it began with would draw other numbers: never without a word."""

from pathlib import Path
from typing import Any

import pytest
import torch

import credo
from credo.core.kernels import build
from credo.data import Batches, Split
from credo.models import build_model
from credo.training.files.checkpoint import load_checkpoint, save_checkpoint

needs_compiler = pytest.mark.skipif(build._compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def nothing_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_used", {})
    for name in ("CREDO_KERNELS", "CREDO_KERNELS_CHANGE"):
        monkeypatch.delenv(name, raising=False)


def fit(path: Path, epochs: int, method: Any = credo.BBB) -> credo.Posterior:
    torch.manual_seed(0)
    data = Split(torch.randn(16, 3), torch.randint(2, (16,)))
    posterior: credo.Posterior = method(build_model("mlp", inputs=(3,), classes=2, hidden=[4], seed=0), data_size=16)
    credo.fit(posterior, Batches(data, batch_size=8), epochs=epochs, checkpoint=path, progress=False)
    return posterior


@needs_compiler
def test_going_on_without_compiled_kernels_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path / "c.pt", 1)
    monkeypatch.setenv("CREDO_KERNELS", "0")
    with pytest.raises(credo.FileFormatError) as caught:
        fit(tmp_path / "c.pt", 2)
    message = str(caught.value)
    assert "c.pt was trained with compiled kernels, which are not used now: CREDO_KERNELS=0 is set" in message
    assert "unset CREDO_KERNELS" in message
    assert "CREDO_KERNELS_CHANGE=1" in message


@needs_compiler
def test_going_on_with_compiled_kernels_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDO_KERNELS", "0")
    fit(tmp_path / "c.pt", 1)
    monkeypatch.delenv("CREDO_KERNELS")
    with pytest.raises(credo.FileFormatError, match=r"trained without compiled kernels.*set CREDO_KERNELS=0"):
        fit(tmp_path / "c.pt", 2)


@needs_compiler
def test_the_change_can_be_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path / "c.pt", 1)
    monkeypatch.setenv("CREDO_KERNELS", "0")
    monkeypatch.setenv("CREDO_KERNELS_CHANGE", "1")
    assert fit(tmp_path / "c.pt", 2).steps == 4
    monkeypatch.delenv("CREDO_KERNELS_CHANGE")
    assert fit(tmp_path / "c.pt", 3).steps == 6  # begun anew with torch, as far as kernels go


@needs_compiler
def test_a_method_without_noise_goes_on_with_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path / "c.pt", 1, credo.MAP)
    monkeypatch.setenv("CREDO_KERNELS", "0")
    assert fit(tmp_path / "c.pt", 2, credo.MAP).steps == 4


def test_a_checkpoint_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    fit(tmp_path / "c.pt", 1)
    state = load_checkpoint(tmp_path / "c.pt")
    del state["kernels"]
    save_checkpoint(tmp_path / "c.pt", state)
    assert fit(tmp_path / "c.pt", 2).steps == 4
