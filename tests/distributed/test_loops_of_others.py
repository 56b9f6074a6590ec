"""Optimisers under torch's DistributedDataParallel, by hand, by Lightning's "ddp" and by Hugging Face's Trainer.

Two processes: they train one posterior after `credo.distribute`, and raise at the first step without it.
"""

import importlib.util
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

WORKER = Path(__file__).with_name("loops_worker.py")
PACKAGES = {"torch": ("torch",), "lightning": ("lightning",), "transformers": ("transformers", "accelerate")}


@pytest.fixture(scope="module", params=PACKAGES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    for package in PACKAGES[request.param]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    done = forked.run(WORKER, request.param, str(folder), folder=folder)
    assert done.returncode == 0, done.stdout
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.part(1)
def test_without_distribute_every_process_raises_at_its_first_step(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert "one of 2 processes" in one["message"]
        assert "credo.distribute(optimizer.posterior)" in one["message"]


@pytest.mark.parametrize("kind", ["VOGN", "OGN", "KFAC", "NoisyKFAC", "IVON"])
def test_distributed_processes_stay_the_same_and_make_the_steps_of_one(found: list[dict[str, Any]], kind: str) -> None:
    first, second = (one[kind]["together"] for one in found)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    for name, value in found[0][kind]["alone"].items():
        torch.testing.assert_close(first[name], value, rtol=1e-6, atol=1e-8)
