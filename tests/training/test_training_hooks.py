"""`fit` lets a method pass over the training data after each epoch and after the last one."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import credo
from credo.data import Batches, Split

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Watching(credo.MAP):
    """Records what the hooks get."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.calls: list[tuple[Any, ...]] = []

    def end_epoch_(self, loader: Iterable[Any], *, epoch: int, epochs: int) -> None:
        self.calls.append((epoch, epochs, self.steps, torch.cat([x for x, _ in loader])))

    def end_training_(self, loader: Iterable[Any]) -> None:
        self.calls.append(("end", self.lr_scale, self.model.weight.detach().clone(), torch.cat([x for x, _ in loader])))


def make() -> Watching:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Watching(nn.Linear(3, 2), data_size=12, lr=0.5)


def loader() -> Batches:
    return Batches(Split(X, Y), batch_size=4, seed=0)


def test_they_are_called_in_order_with_all_rows() -> None:
    posterior = credo.fit(make(), loader(), epochs=2, progress=False)
    assert [call[:3] for call in posterior.calls[:2]] == [(1, 2, 3), (2, 2, 6)]
    kind, scale, weight, _ = posterior.calls[2]
    assert (kind, scale) == ("end", 1.0)
    assert torch.equal(weight, posterior.model.weight)
    for call in posterior.calls:
        assert torch.equal(call[-1].sort(0).values, X.sort(0).values)


def test_they_do_not_change_training() -> None:
    watched, plain = make(), credo.MAP(make().model, data_size=12, lr=0.5)
    before = torch.get_rng_state()
    for posterior in (watched, plain):
        credo.fit(posterior, loader(), epochs=2, progress=False)
    assert torch.equal(watched.model.weight, plain.model.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_last_one_sees_the_weights_that_early_stopping_restores() -> None:
    posterior = make()
    held_out = [(X[:4], 1 - Y[:4])]  # wrong labels: the first epoch is the best
    credo.fit(posterior, loader(), epochs=5, validation=held_out, patience=1, progress=False)
    assert posterior.calls[-1][0] == "end"
    assert len(posterior.calls) < 6
    assert torch.equal(posterior.calls[-1][2], posterior.model.weight)


def test_a_resumed_training_calls_them_with_the_same_batches(tmp_path: Path) -> None:
    whole = credo.fit(make(), loader(), epochs=3, progress=False)
    parts = make()
    credo.fit(parts, loader(), epochs=2, progress=False, checkpoint=tmp_path / "c.pt", schedule="constant")
    again = make()
    credo.fit(again, loader(), epochs=3, progress=False, checkpoint=tmp_path / "c.pt", schedule="constant")
    for one, other in zip(whole.calls[-2:], again.calls, strict=True):
        assert torch.equal(one[-1], other[-1])


@pytest.mark.parametrize("members", [1, 2])
def test_members_of_an_ensemble_are_called_too(members: int) -> None:
    parts = [make() for _ in range(members)]
    credo.fit(credo.Ensemble(parts), loader(), epochs=1, progress=False)
    assert all([call[0] for call in part.calls] == [1, "end"] for part in parts)
