"""Two processes share the candidates of `auto`, and choose what one process chooses."""

from pathlib import Path

import forked
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import credo
from credo.data import Batches, Split


def _chosen(folder: Path) -> credo.Posterior:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(160, 2, generator=generator)
    train = Batches(Split(x, (x[:, 0] > 0).long()), batch_size=40)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    return credo.auto(net, train, passes=90, run=folder, progress=False)


def _work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    evidence = _chosen(Path(folder) / "run").evidence
    assert evidence is not None
    Path(folder, f"{rank}.txt").write_text(repr(evidence.rows), encoding="utf-8")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_choose_what_one_chooses(tmp_path: Path) -> None:
    start = forked.FORKS.get_start_method()
    mp.start_processes(_work, args=(str(tmp_path),), nprocs=2, start_method=start)  # type: ignore[attr-defined, no-untyped-call]
    alone = _chosen(tmp_path / "alone").evidence
    assert alone is not None
    both = [Path(tmp_path, f"{rank}.txt").read_text(encoding="utf-8") for rank in (0, 1)]
    assert both[0] == both[1]
    # Noise is drawn otherwise in a group of processes, also of one, so only the plain network is the same to the bit.
    assert repr(next(row for row in alone.rows if row.name == "plain")) in both[0]
    assert "before it was trained on all rows" in both[0]
    assert both[0].startswith(f"(Tried(name={alone.chosen!r}, state='chosen'")
