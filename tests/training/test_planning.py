"""Arguments that were left open are chosen by `fit` for the length of the training, once."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import credo
from credo.methods.planning import LONG_TRAINING, PRIOR_PRECISION, TEMPERATURES, planned_decay, planned_temperature

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 2
BATCHES = [(X[:6], Y[:6]), (X[6:], Y[6:])]
METHODS = ("bbb", "vogn", "ivon", "noisy-kfac")


def make(method: str, **options: object) -> credo.Posterior:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return credo.METHODS[method](nn.Linear(3, 2), data_size=12, **options)


def fit(posterior: credo.Posterior, epochs: int, **options: object) -> credo.Posterior:
    return credo.fit(posterior, BATCHES, epochs=epochs, progress=False, **options)


def expected(method: str, epochs: int) -> float:
    return 0.6 if method == "noisy-kfac" else planned_temperature("classification", epochs)


def test_temperatures_grow_with_the_epochs_up_to_those_of_a_long_training() -> None:
    assert planned_temperature("regression", 5) == TEMPERATURES["regression"] * 5 / LONG_TRAINING
    assert planned_temperature("classification", 1000) == TEMPERATURES["classification"]
    assert planned_temperature("something else", 1000) == 1


def test_bbb_begins_long_trainings_with_less_noise_which_has_time_to_grow_back() -> None:
    for steps, std in ((1, 0.02 * math.exp(-1 / 200)), (200, 0.02 / math.e), (400, 0.005), (10**6, 0.005)):
        posterior = make("bbb")
        for _ in range(2):  # planned once
            posterior.plan_training_(steps=steps, epochs=5)
        assert posterior.std()["weight"].flatten().tolist() == pytest.approx([std] * 6)
    for given in ({"init": 0.02}, {"init": {"std": 0.02}}, {"temperature": 0.1}, {"spread": "relative"}):
        posterior = make("bbb", **given)
        before = posterior.rho.clone()
        posterior.plan_training_(steps=800, epochs=5)
        assert torch.equal(posterior.rho, before)


def test_averages_span_a_twentieth_of_the_training() -> None:
    assert planned_decay(4000) == 1 - 1 / 200
    assert planned_decay(10) == 1 - 1 / 20
    assert planned_decay(10**9) == 1 - 1 / 1000


@pytest.mark.parametrize("method", METHODS)
def test_open_arguments_are_chosen_before_the_first_step_only(method: str) -> None:
    posterior = make(method)
    assert posterior.temperature == 1
    fit(posterior, 4)
    assert posterior.temperature == expected(method, 4)
    given = posterior.config()["temperature"]
    assert (given["to"] if method == "vogn" else given) == posterior.temperature
    if method != "bbb":
        precision = 1.0 if method == "noisy-kfac" else PRIOR_PRECISION
        assert posterior.prior.std == pytest.approx(precision**-0.5)
    if method == "vogn":
        assert posterior.curvature_decay == planned_decay(8)
        assert posterior.config()["curvature"]["decay"] == planned_decay(8)
    fit(posterior, 10)
    assert posterior.temperature == expected(method, 4)


@pytest.mark.parametrize("method", METHODS)
def test_given_arguments_stay(method: str) -> None:
    posterior = fit(make(method, temperature=0.7, prior=2.0), 2)
    assert posterior.temperature == 0.7
    assert posterior.prior.std == 2
    assert not {"temperature", "prior_precision"} & set(posterior.planned)


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_training_keeps_what_was_chosen(method: str, tmp_path: Path) -> None:
    whole = fit(make(method), 2, checkpoint=tmp_path / "whole.pt", schedule="constant")
    fit(whole, 4, checkpoint=tmp_path / "whole.pt", schedule="constant")  # the same object, now planned
    fit(make(method), 2, checkpoint=tmp_path / "c.pt", schedule="constant")
    again = fit(make(method), 4, checkpoint=tmp_path / "c.pt", schedule="constant")
    assert again.temperature == expected(method, 2)
    assert again.planned == whole.planned
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_file_has_what_was_chosen(method: str, tmp_path: Path) -> None:
    posterior = fit(make(method), 3)
    credo.save(posterior, tmp_path / "p.safetensors")
    again = credo.load(tmp_path / "p.safetensors", model=nn.Linear(3, 2))
    assert again.temperature == posterior.temperature
    assert torch.equal(credo.predict(again, X).probs, credo.predict(posterior, X).probs)
