"""Small experiments on data that need no file, and nothing of this machine's own data in sight."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from credo.experiments.config import Experiment, make_experiment


@pytest.fixture(autouse=True)
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No data sets; one thread, which is fastest for networks this small and the same everywhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CREDO_DATA", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small() -> Callable[..., Experiment]:
    """`small(method={…}, training={…}, …)`: three epochs of 2-8-5 on a hundred points, with changes by section."""

    def make(**changes: dict[str, Any]) -> Experiment:
        tables: dict[str, dict[str, Any]] = {
            "data": {"name": "blobs", "n": 100},
            "model": {"hidden": [8]},
            "method": {"name": "bbb", "lr": 0.01, "temperature": 1.0},
            "training": {"epochs": 3, "batch_size": 32, "schedule": "constant", "validation_draws": 2},
        }
        for section, options in changes.items():
            named = section in ("data", "method") and "name" in options
            tables[section] = dict(options) if named else {**tables[section], **options}
        return make_experiment(tables)

    return make
