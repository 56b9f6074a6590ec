"""`calibrate=True` without validation: rows choose the calibration, and are trained on in the second half."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.data import Batches, Split
from credo.training.rows.held_out import Divided, choose, divide, hold_out

ROWS, EPOCHS, SEED = 120, 10, 3
METHODS = (credo.MAP, credo.BBB, credo.VOGN, credo.NoisyKFAC)
Make = Callable[..., Any]


@pytest.fixture
def split() -> Split:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 4, generator=generator)
    noise = torch.randn(ROWS, generator=generator)
    return Split(x, (x[:, 0] + x[:, 1] * x[:, 2] + noise > 0).long())


@pytest.fixture
def network() -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    return make


def batches(split: Split, kind: str = "batches") -> Any:
    if kind == "batches":
        return Batches(split, batch_size=16, seed=SEED)
    if kind == "list":
        return list(zip(split.x.split(16), split.y.split(16), strict=True))
    return DataLoader(TensorDataset(split.x, split.y), batch_size=16, shuffle=True)


def fitted(posterior: credo.Posterior, loader: Any, **options: Any) -> credo.Posterior:
    options = {"epochs": EPOCHS, "calibrate": True, "progress": False, "seed": SEED, **options}
    return credo.fit(posterior, loader, **options)


def keys(x: Tensor) -> list[float]:
    return x[:, 0].tolist()


@pytest.mark.parametrize("kind", ["batches", "list", "loader"])
def test_held_out_rows_are_trained_on_in_the_second_half(network: Make, split: Split, kind: str) -> None:
    seen: list[list[float]] = [[] for _ in range(EPOCHS)]
    loader = batches(split, kind)
    rest, held = hold_out(loader, SEED, wanted=0)
    held_rows = {key for x, _ in held for key in keys(x)}
    epoch = 0

    def nll(net: Any, batch: Any) -> Tensor:
        seen[epoch].extend(keys(batch[0]))
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    posterior = credo.MAP(network(), data_size=ROWS)
    before = torch.get_rng_state()
    for _ in credo.train(posterior, loader, epochs=EPOCHS, calibrate=True, seed=SEED, nll=nll):
        epoch += 1
    assert torch.equal(torch.get_rng_state(), before)
    assert len(held_rows) == {"batches": 12, "list": 16, "loader": 12}[kind]
    every = sorted(keys(split.x))
    for rows in seen[:5]:
        assert sorted(rows) == sorted(set(every) - held_rows)
    for rows in seen[5:]:
        assert sorted(rows) == every
    assert posterior.steps == 5 * len(rest) + 5 * len(loader)
    assert sum(map(len, seen)) <= EPOCHS * ROWS
    assert posterior.calibration is not None
    assert posterior.calibration.rows == len(held_rows)


def test_the_choice_is_that_of_the_posterior_before_it_saw_the_rows(network: Make, split: Split) -> None:
    """MAP makes no plan, so that a training on the other rows that ends after five of ten epochs is the same."""
    loader = batches(split)
    rest, held = hold_out(loader, SEED, wanted=0)
    by_hand = credo.MAP(network(), data_size=ROWS)
    for record in credo.train(by_hand, rest, epochs=EPOCHS, seed=SEED):
        if record.epoch == 5:
            break
    credo.calibrate(by_hand, list(held), prior=64.0, progress=False)
    posterior = fitted(credo.MAP(network(), data_size=ROWS), loader)
    assert posterior.calibration == by_hand.calibration
    assert posterior.lr_scale == 1.0


class Stop:
    """Stop after a number of steps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


@pytest.mark.parametrize("method", METHODS)
def test_training_that_was_stopped_anywhere_resumes_to_the_same_bits(
    network: Make, split: Split, method: Any, tmp_path: Path
) -> None:
    """Stopped within the first phase, after its last step, after the first step of the last phase, and within it."""

    def make() -> credo.Posterior:
        return method(network(), data_size=ROWS, seed=SEED)  # type: ignore[no-any-return]

    whole = fitted(make(), batches(split))
    path = tmp_path / "checkpoint.pt"
    for steps in (18, 17, 1, 20):  # 5 epochs of 7 batches of the other rows, then of 8: 35 steps and 40
        with pytest.raises(credo.training.TrainingStopped):
            fitted(make(), batches(split), checkpoint=path, stop=Stop(steps))
    again = fitted(make(), batches(split), checkpoint=path)
    assert again.calibration == whole.calibration
    assert again.ledger.to_list() == whole.ledger.to_list()
    expected = whole.state_dict()
    for name, value in again.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(value, expected[name]), name
    once_more = fitted(make(), batches(split), checkpoint=path)  # finished: no steps
    assert once_more.steps == whole.steps
    assert once_more.calibration == whole.calibration


def test_more_epochs_keep_the_choice_and_all_rows(network: Make, split: Split, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    loader = batches(split)
    first = fitted(credo.MAP(network(), data_size=ROWS), loader, checkpoint=path)
    longer = fitted(credo.MAP(network(), data_size=ROWS), loader, checkpoint=path, epochs=2 * EPOCHS)
    assert longer.calibration == first.calibration
    assert longer.steps == first.steps + EPOCHS * len(loader)
    with pytest.raises(credo.FileFormatError, match="held out"):
        fitted(credo.MAP(network(), data_size=ROWS), loader, checkpoint=path, epochs=2 * EPOCHS, calibrate=False)


def test_the_ledger_knows_both_uses_and_conformal_prediction_warns(network: Make, split: Split) -> None:
    loader = batches(split)
    held = list(hold_out(loader, SEED, wanted=0)[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior = fitted(credo.VOGN(network(), data_size=ROWS), loader)
    assert posterior.ledger.served(held) == {"training": 1.0, "calibration": 1.0}
    assert posterior.ledger.served([(split.x, split.y)])["training"] == 1.0
    with pytest.warns(credo.ReusedRowsWarning, match=r"training \(100 %\) and calibration \(100 %\)"):
        credo.conformal(posterior, held, alpha=0.5)


def test_a_posterior_that_was_trained_on_the_rows_before_warns(network: Make, split: Split) -> None:
    posterior = fitted(credo.MAP(network(), data_size=ROWS), batches(split), epochs=2, calibrate=False)
    with pytest.warns(credo.ReusedRowsWarning, match=r"Rows for calibration have served training \(100 %\)"):
        fitted(posterior, batches(split))


@pytest.mark.parametrize("method", [credo.Laplace, credo.SWAG, credo.SGHMC])
def test_methods_without_a_distribution_before_the_end_need_validation(
    network: Make, split: Split, method: Any
) -> None:
    with pytest.raises(ValueError, match=f"when {method.__name__} has no distribution yet.*Give validation="):
        fitted(method(network(), data_size=ROWS), batches(split))


def test_loaders_without_rows_to_hold_out_say_so(network: Make, split: Split) -> None:
    loader = credo.data.WithLength(batches(split), batches=8)
    with pytest.raises(ValueError, match="No rows can be held out of a WithLength: give validation="):
        fitted(credo.MAP(network(), data_size=ROWS), loader)
    with pytest.raises(ValueError, match="Of 1 training batches none can be held out"):
        fitted(credo.MAP(network(), data_size=ROWS), [(split.x, split.y)])


@pytest.mark.parametrize("kind", ["batches", "list", "loader"])
def test_divided_batches_say_which_rows_are_held_out(network: Make, split: Split, kind: str) -> None:
    loader = batches(split, kind)
    rest, rows = divide(loader, choose(loader, SEED, wanted=0))
    divided = Divided(loader, rest, list(rows))
    assert hold_out(divided, seed=7) == (rest, divided.rows)
    posterior, expected = (fitted(credo.BBB(network(), data_size=ROWS), each) for each in (divided, loader))
    assert posterior.calibration == expected.calibration
    state = posterior.state_dict()
    for name, value in expected.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(state[name], value), name
