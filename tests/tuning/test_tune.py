"""Successive halving: what it trains, what it returns, that it goes on, and what it rejects."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import credo

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]])
TRAIN, HELD_OUT = [(X[:16], Y[:16])], [(X[16:], Y[16:])]


class Factory:
    """Makes plain networks and remembers their arguments."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> credo.MAP:
        self.made.append(given)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return credo.MAP(nn.Linear(3, 1), data_size=16, likelihood=credo.GaussianNoise(0.5), **given)


def search(factory: Factory, **options: Any) -> credo.tuning.Tuned:
    given = {"epochs": 9, "trials": 9, "ranges": {"lr": (1e-4, 0.3)}, "progress": False, **options}
    return credo.tune(factory, TRAIN, HELD_OUT, **given)


def test_thirds_go_on_and_the_best_is_returned_trained() -> None:
    factory = Factory()
    found = search(factory)
    assert len(factory.made) == 9 + 3 + 1
    assert factory.made[0] == {}, "the defaults are among the trials"
    rates = [given["lr"] for given in factory.made[1:9]]
    assert all(1e-4 <= rate <= 0.3 for rate in rates)
    assert sum(rate < 0.0055 for rate in rates) == 4, "half of them below the middle of the logarithmic range"
    assert [trial.epochs for trial in found.trials] == [9, 3, 3, *[1] * 6]
    assert found.posterior.steps == 9
    assert found.arguments == factory.made[-1]
    nll = -credo.predict(found.posterior, HELD_OUT).log_likelihood.mean().item()
    assert found.trials[0].nll == pytest.approx(nll, rel=1e-5)
    first = [trial.nll for trial in found.trials[3:]]
    assert first == sorted(first)
    assert found.posterior.ledger.served(HELD_OUT) == {"selection": 1.0}
    assert str(found).splitlines()[0].split() == ["lr", "epochs", "NLL"]


def test_the_same_seed_finds_the_same() -> None:
    first, second, other = search(Factory()), search(Factory()), search(Factory(), seed=1)
    assert first.trials == second.trials
    assert all(
        torch.equal(a, b) for a, b in zip(first.posterior.parameters(), second.posterior.parameters(), strict=True)
    )
    assert first.trials != other.trials


def test_a_stopped_search_goes_on(tmp_path: Path) -> None:
    path, whole = tmp_path / "trials.json", search(Factory())

    class StopError(Exception):
        pass

    class Stopping(Factory):
        def __call__(self, **given: Any) -> credo.MAP:
            if len(self.made) == 5:
                raise StopError
            return super().__call__(**given)

    with pytest.raises(StopError):
        search(Stopping(), results=path)
    assert len(json.loads(path.read_text())["done"]) == 5
    rest = Factory()
    assert search(rest, results=path).trials == whole.trials
    assert len(rest.made) == 13 - 5
    with pytest.raises(ValueError, match="of another search"):
        search(Factory(), results=path, epochs=18)


def test_failed_trials_are_last_and_all_failed_is_an_error() -> None:
    found = search(Factory(), ranges={"lr": (1e-3, 1e30)}, trials=4)
    assert found.trials[0].nll < float("inf")
    with pytest.raises(credo.CredoError, match="Every trial failed"):
        credo.tune(lambda **given: Factory()(lr=1e38), TRAIN, HELD_OUT, epochs=9, trials=1, ranges={"lr": (1, 2)})


@pytest.mark.parametrize("method", [name for name in credo.METHODS if name not in ("ensemble", "ogn", "kfac")])
def test_every_method_declares_arguments_that_it_takes(method: str) -> None:
    cls = credo.METHODS[method]
    assert cls.tunable
    for end in (0, 1):
        cls(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), data_size=4, **{n: r[end] for n, r in cls.tunable.items()})


@pytest.mark.parametrize("ranges", [{"lr": 3}, {"lr": (1, 1)}, {"lr": (0, 1)}, {"lr": ("a", 1)}, {}])
def test_impossible_ranges(ranges: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"lowest and highest|Nothing to tune"):
        search(Factory(), ranges=ranges)
