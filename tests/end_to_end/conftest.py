"""What tests of documentation and examples share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import credo


@pytest.fixture
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, no data sets but the bundled ones, and nothing left behind in the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CREDO_DATA", str(tmp_path / "no-data"))
    # The pages print numbers; compiled noise would make them depend on whether there is a compiler.
    monkeypatch.setenv("CREDO_KERNELS", "0")
    methods, threads, state = dict(credo.METHODS), torch.get_num_threads(), torch.get_rng_state()
    yield
    credo.METHODS.clear()
    credo.METHODS.update(methods)
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
