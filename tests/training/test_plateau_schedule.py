"""The plateau schedule against torch's own, and resumed in the middle of its waiting."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import credo
from credo.data import Batches, load_dataset, split_validation
from credo.experiments.config import make_experiment
from credo.training import EpochRecord, make_schedule
from credo.training.schedule import Plateau


def torchs_factors(scores: list[float], **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, mode="max", **options)
    factors = []
    for score in scores:
        optimizer.step()
        scheduler.step(score)
        factors.append(optimizer.param_groups[0]["lr"])
    return factors


@pytest.mark.parametrize("wait", [0, 2, 6])
@pytest.mark.parametrize("floor", [0.0, 0.02])
def test_the_same_rates_as_torchs(wait: int, floor: float) -> None:
    generator = torch.Generator().manual_seed(3)
    rising = torch.linspace(0.5, 0.9, 60) + 0.1 * torch.randn(60, generator=generator)
    flat = [0.9, 0.90001, 0.90002, 0.90008, 0.9002]  # gains below and above a threshold of 1e-4
    scores = [*rising.tolist(), *flat, *[0.2] * 40]
    plateau = Plateau(decay=0.3, wait=wait, floor=floor)
    ours = [plateau.after(scores[: count + 1])(count + 1.0) for count in range(len(scores))]
    theirs = torchs_factors(scores, factor=0.3, patience=wait, min_lr=floor, threshold=1e-4)
    # Torch ignores changes of the rate below 1e-8.
    assert ours == pytest.approx(theirs, abs=3e-8)
    assert len(set(theirs)) > 2


def test_losses_may_be_negative_and_smaller_ones_are_better() -> None:
    plateau = Plateau(decay=0.5, wait=0, threshold=0.1)
    # Scores are the negative of the loss: −2 to −1.9 is a gain of less than a tenth, 1 to 1.2 of more.
    assert [plateau.after(s)(9.0) for s in ([-2.0], [-2.0, -1.9], [1.0, 1.05], [1.0, 1.2])] == [1, 0.5, 0.5, 1]


def test_warmup_goes_before_it() -> None:
    schedule = make_schedule("plateau", epochs=10, wait=0, warmup=2)
    assert isinstance(schedule, Plateau)
    assert [schedule(time) for time in (0.0, 0.5, 2.0, 5.0)] == [0, 0.25, 1, 1]
    assert schedule.after([1.0, 0.5])(1.0) == pytest.approx(0.05)


def records(path: Path, epochs: int) -> tuple[list[EpochRecord], credo.Posterior]:
    digits = load_dataset("digits")
    train, held_out = split_validation(digits.train, size=300, seed=0)
    torch.manual_seed(0)
    posterior = credo.BBB(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), data_size=len(train), lr=0.5, temperature=1.0)
    found = credo.train(
        posterior,
        Batches(train, batch_size=400),
        epochs=epochs,
        validation=[(held_out.x, held_out.y)],
        validation_draws=2,
        schedule=make_schedule("plateau", epochs=12, wait=0, decay=0.5),
        checkpoint=path,
    )
    return list(found), posterior


def test_a_resumed_training_has_the_same_rates_and_weights(tmp_path: Path) -> None:
    whole, posterior = records(tmp_path / "whole.pt", 12)
    rates = [record.lr_scale for record in whole]
    assert len(set(rates)) > 2, "the rate must fall for this test to say anything"
    for stop in (3, 7, 8):
        records(tmp_path / f"part{stop}.pt", stop)
        resumed, again = records(tmp_path / f"part{stop}.pt", 12)
        assert [record.lr_scale for record in resumed] == rates
        assert all(torch.equal(a, b) for a, b in zip(posterior.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, "decay=1.0 must lie between"),
        ({"wait": -1}, "wait=-1 must be a whole number"),
        ({"floor": 2.0}, "floor=2.0"),
    ],
)
def test_impossible_plateaus(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule("plateau", epochs=5, **options)


def test_without_validation_there_is_no_plateau() -> None:
    posterior = credo.MAP(nn.Linear(1, 2), data_size=4)
    with pytest.raises(ValueError, match="needs validation data"):
        next(credo.train(posterior, [None], epochs=1, schedule="plateau"))
    with pytest.raises(ValueError, match=r"training\.validation above 0"):
        make_experiment({"training": {"schedule": "plateau", "validation": 0.0}})
    assert make_experiment({"training": {"schedule": "plateau", "wait": 3}}).training.make_schedule().wait == 3
