"""Numbers of draws and steps are whole: every place that takes one says so."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.support.validate import checked_count, is_count
from credo.evaluate import sample_study


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(5, 4), torch.zeros(5, dtype=torch.long))]


PLACES: dict[str, Callable[[Any], Any]] = {
    "bbb": lambda draws: credo.BBB(net(), data_size=5, draws=draws),
    "vogn": lambda draws: credo.VOGN(net(), data_size=5, draws=draws),
    "ivon": lambda draws: credo.IVON(net(), data_size=5, draws=draws),
    "noisy-kfac": lambda draws: credo.NoisyKFAC(net(), data_size=5, draws=draws),
    "predict": lambda draws: credo.predict(credo.BBB(net(), data_size=5), torch.zeros(5, 4), draws=draws),
    "predict a point": lambda draws: credo.predict(credo.MAP(net(), data_size=5), torch.zeros(5, 4), draws=draws),
    "sample study": lambda draws: sample_study(credo.BBB(net(), data_size=5), batches(), draws=draws),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("draws", [2.5, 0, -1, float("nan"), float("inf"), "3", None, True])
def test_a_number_of_draws_that_is_none_is_refused_by_name(place: str, draws: Any) -> None:
    with pytest.raises(ValueError, match=r"draws=.* must be a whole number.*1 or more"):
        PLACES[place](draws)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("draws", [2, 2.0, np.int64(2)])
def test_whole_numbers_of_any_kind_are_taken(place: str, draws: Any) -> None:
    made = PLACES[place](draws)
    if isinstance(made, credo.Posterior):
        made.step(lambda model: F.cross_entropy(model(batches()[0][0]), batches()[0][1]))
        assert made.step_draws == 2


def test_other_counts() -> None:
    posterior = credo.BBB(net(), data_size=5)
    with pytest.raises(ValueError, match=r"epochs=1.5 must be a whole number, 0 or more"):
        credo.fit(posterior, batches(), epochs=1.5, progress=False)
    with pytest.raises(ValueError, match=r"batch_size=0.5 must be a whole number"):
        credo.predict(posterior, torch.zeros(5, 4), batch_size=0.5)
    with pytest.raises(ValueError, match=r"kl_term.weight='warmup' needs warmup_steps.*got 2.5"):
        credo.BBB(net(), data_size=5, kl_term={"weight": "warmup", "warmup_steps": 2.5})
    assert checked_count("n", np.float32(4)) == 4
    assert type(checked_count("n", torch.tensor(4))) is int
    assert not is_count(0)
    assert is_count(0, least=0)


SEEDED: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda seed, method=method: method(net(), data_size=5, seed=seed)
        for name, method in credo.METHODS.items()
        if name not in ("ensemble", "mc-dropout")
    },
    "mc-dropout": lambda seed: credo.MCDropout(nn.Sequential(nn.Dropout(), net()), data_size=5, seed=seed),
    "predict": lambda seed: credo.predict(credo.BBB(net(), data_size=5), torch.zeros(5, 4), seed=seed),
    "predict a point": lambda seed: credo.predict(credo.MAP(net(), data_size=5), torch.zeros(5, 4), seed=seed),
}


@pytest.mark.parametrize("place", SEEDED)
@pytest.mark.parametrize("seed", [1.5, float("nan"), float("inf"), "3", None, 2**64, 10**400, -(2**63) - 1])
def test_a_seed_that_is_none_is_an_error_in_words(place: str, seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed=.* must be a whole number from"):
        SEEDED[place](seed)


@pytest.mark.parametrize("place", SEEDED)
@pytest.mark.parametrize("seed", [0, -1, 2.0, np.int64(3), torch.tensor(4), 2**64 - 1])
def test_whole_seeds_of_any_kind_are_taken(place: str, seed: Any) -> None:
    made = SEEDED[place](seed)
    assert not isinstance(made, credo.Posterior) or made.seed == int(seed)
