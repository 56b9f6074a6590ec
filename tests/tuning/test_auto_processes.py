"""Two processes share the candidates of `auto`, and choose what one process chooses."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import credo
from credo.data import Batches, Split
from credo.tuning import race


def _chosen(folder: Path, **budget: Any) -> credo.Posterior:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(160, 2, generator=generator)
    train = Batches(Split(x, (x[:, 0] > 0).long()), batch_size=40)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    return credo.auto(net, train, run=folder, progress=False, **budget or {"passes": 90})


def _work(rank: int, folder: str) -> None:
    race.LEAST_STEPS_UNTRAINED = 50  # so that there are rounds, with candidates to share
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    evidence = _chosen(Path(folder) / "run").evidence
    assert evidence is not None
    Path(folder, f"{rank}.txt").write_text(repr(evidence.rows), encoding="utf-8")
    timed = _chosen(Path(folder) / "timed", budget=4).evidence  # by the clock of one of them
    assert timed is not None
    Path(folder, f"{rank}-timed.txt").write_text(repr(timed.rows), encoding="utf-8")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_choose_what_one_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mp.spawn(_work, args=(str(tmp_path),), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
    monkeypatch.setattr(race, "LEAST_STEPS_UNTRAINED", 50)
    alone = _chosen(tmp_path / "alone").evidence
    assert alone is not None
    both = [Path(tmp_path, f"{rank}.txt").read_text(encoding="utf-8") for rank in (0, 1)]
    assert both == [repr(alone.rows)] * 2
    first, second = (Path(tmp_path, f"{rank}-timed.txt").read_text(encoding="utf-8") for rank in (0, 1))
    assert first == second
