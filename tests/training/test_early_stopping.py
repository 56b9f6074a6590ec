"""Early stopping on a walk whose every epoch is known beforehand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.training import EpochRecord


def walker() -> credo.MAP:
    """Gradient descent on loss = w from w = 0: after epoch e the weight is −e."""
    line = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(line.weight)
    return credo.MAP(line, data_size=1, optimizer="sgd", lr=1.0, likelihood=credo.GaussianNoise(1.0))


def walk(posterior: credo.Posterior, target: float, **options: Any) -> list[EpochRecord]:
    one = torch.ones(1, 1)
    options = {"epochs": 20, "nll": lambda net, batch: net(one).sum(), **options}
    return list(
        credo.train(posterior, [None], validation=[(one, torch.full((1, 1), target))], schedule="constant", **options)
    )


@pytest.mark.parametrize("monitor", ["nll", "rmse"])
@pytest.mark.parametrize("patience", [1, 2, 3])
def test_stops_after_patience_and_keeps_the_best(monitor: str, patience: int) -> None:
    posterior = walker()
    records = walk(posterior, -3.1, monitor=monitor, patience=patience)
    # Best at w = −3, after epoch 3; then `patience` epochs that are worse.
    assert [record.epoch for record in records] == list(range(1, 4 + patience))
    assert [record.best for record in records] == [True] * 3 + [False] * patience
    assert records[2].validation["rmse"] == pytest.approx(0.1, abs=1e-5)
    assert posterior.model.weight.item() == -3
    assert posterior.steps == 3  # the optimiser's and the generator's state are those of the best epoch, too


def test_equal_is_not_better() -> None:
    posterior = walker()
    with torch.no_grad():
        posterior.model.weight.fill_(-1.0)
    for group in posterior.optimizer_step.optimizer.param_groups:
        group["initial_lr"] = 0.0
    records = walk(posterior, -3.0, patience=2)
    assert [record.best for record in records] == [True, False, False]


def test_without_patience_the_last_state_stays() -> None:
    posterior = walker()
    records = walk(posterior, -3.1, epochs=6)
    assert len(records) == 6
    assert [record.best for record in records] == [True] * 3 + [False] * 3
    assert posterior.model.weight.item() == -6


@pytest.mark.parametrize("kill_after", [2, 3, 4, 5])
def test_patience_is_counted_across_a_resume(kill_after: int, tmp_path: Path) -> None:
    path, one = tmp_path / "c.pt", torch.ones(1, 1)
    validation = [(one, torch.full((1, 1), -3.1))]
    options: dict[str, Any] = {"validation": validation, "nll": lambda net, batch: net(one).sum(), "checkpoint": path}
    for record in credo.train(walker(), [None], epochs=20, schedule="constant", patience=3, **options):
        if record.epoch == kill_after:
            break
    posterior = walker()
    records = list(credo.train(posterior, [None], epochs=20, schedule="constant", patience=3, **options))
    assert [record.epoch for record in records] == list(range(1, 7))
    assert posterior.model.weight.item() == -3
    # A run that has stopped stays stopped, and gives the best state again.
    again = walker()
    assert len(list(credo.train(again, [None], epochs=20, schedule="constant", patience=3, **options))) == 6
    assert again.model.weight.item() == -3


def test_accuracy_counts_upwards() -> None:
    """Class 1 wins once w < −2.5: accuracies 0, 0, 1, 1, 1."""

    class Threshold(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([torch.zeros(len(x)), (-2.5 - self.w).expand(len(x))], -1)

    posterior = credo.MAP(Threshold(), data_size=1, optimizer="sgd", lr=1.0)
    validation = [(torch.zeros(4, 1), torch.ones(4, dtype=torch.long))]
    options: dict[str, Any] = {"nll": lambda net, batch: net.w.sum(), "validation": validation, "monitor": "accuracy"}
    records = list(credo.train(posterior, [None], epochs=20, schedule="constant", patience=2, **options))
    assert [record.validation["accuracy"] for record in records] == [0, 0, 1, 1, 1]
    assert [record.best for record in records] == [True, False, True, False, False]
    assert posterior.model.w.item() == -3
