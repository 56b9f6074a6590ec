"""The terms of the objective against what a step reports; temperatures, weights of the KL, histories."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import credo
from credo.doctor.measure.objective import history_of, kl_weight, last_quarter_drop, objective


def small(**options: Any) -> credo.BBB:
    torch.manual_seed(0)
    return credo.BBB(nn.Linear(3, 2), data_size=50, **options)


def test_terms_are_those_of_a_step() -> None:
    posterior = small(prior=0.4, temperature=0.3, lr=0.0)
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    terms = posterior.step(lambda net: F.cross_entropy(net(x), y))
    found = objective(posterior, nll=terms.nll, cost=None, examples=50, batches=5, steps=posterior.steps)
    assert found.nll == terms.nll
    assert found.kl == pytest.approx(terms.kl, rel=1e-5)
    assert found.penalty == pytest.approx(terms.penalty, rel=1e-5)
    assert (found.temperature, found.kl_weight) == (0.3, 1.0)
    assert found.effective_temperature == pytest.approx(0.3)
    assert found.noise_balance is None


def test_the_kl_of_a_mixture_prior_is_the_posteriors_own() -> None:
    posterior = small(prior=credo.priors.ScaleMixture())
    with torch.no_grad(), posterior.seeded(5):
        wanted = float(posterior.kl())
    found = objective(posterior, nll=0.0, cost=None, examples=50, batches=5, steps=0, seed=5)
    assert found.kl == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("examples", "wanted"), [(50, 0.2), (100, 0.4), (5, 0.02)])
def test_effective_temperature(examples: int, wanted: float) -> None:
    found = objective(small(temperature=0.2), nll=1.0, cost=None, examples=examples, batches=5, steps=3)
    assert found.effective_temperature == pytest.approx(wanted)


def test_weights_of_the_kl_are_averaged_over_an_epoch() -> None:
    blundell = small(kl_term={"weight": "blundell", "batches": 6})
    assert kl_weight(blundell, steps=17, batches=6) == pytest.approx(1.0)
    warmup = small(kl_term={"weight": "warmup", "warmup_steps": 100})
    assert kl_weight(warmup, steps=20, batches=4) == pytest.approx((0.20 + 0.21 + 0.22 + 0.23) / 4)
    assert kl_weight(warmup, steps=500, batches=4) == 1.0
    assert kl_weight(warmup, steps=0, batches=4) == 1.0  # a file does not say
    assert kl_weight(small(kl_term={"weight": lambda step: 1000.0}), steps=1, batches=4) == 1000.0


def test_a_point_estimate_has_no_kl() -> None:
    found = objective(
        credo.MAP(nn.Linear(2, 2), data_size=9, prior=1.0), nll=0.5, cost=None, examples=9, batches=1, steps=4
    )
    assert (found.nll, found.kl, found.penalty, found.temperature, found.effective_temperature) == (
        0.5,
        None,
        None,
        None,
        None,
    )


def test_members_are_averaged() -> None:
    members = [small(temperature=t) for t in (0.1, 0.3)]
    found = objective(credo.Ensemble(members), nll=0.0, cost=None, examples=50, batches=5, steps=0)
    assert found.temperature == pytest.approx(0.2)
    assert found.kl == pytest.approx(sum(float(m.kl().detach()) for m in members) / 2, rel=1e-5)


def test_balance_of_a_trained_posterior_moves_with_std(trained: Callable[..., Any], examine: Any) -> None:
    """From far too small to far too large, the balance rises through 1."""
    found = []
    for std in (1e-4, 0.02, 0.1, 1.0):
        numbers = examine(trained("bbb", "mlp", init=std, prior=1.0)).measurements["objective"]
        found.append(numbers["noise_balance"])
    assert found == sorted(found)
    assert found[0] < 0.001
    assert found[-1] > 10


def test_training_to_the_end_balances(trained: Callable[..., Any], examine: Any) -> None:
    """After many steps of a fast optimiser σ is where cost and pull agree: twenty seeds gave 0.81 to 1.23."""
    posterior = trained("bbb", "mlp", temperature=3.0, lr=2e-2, epochs=30)
    balance = examine(posterior, draws=4).measurements["objective"]["noise_balance"]
    assert 0.5 < balance < 2


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([1.0] * 16, 0.0),
        ([float(v) for v in range(16, 0, -1)], 1 - 1.5 / 5.5),
        ([1.0] * 12 + [0.9, 0.8, 0.5, 0.5], 0.5),
        ([1.0], None),
        ([2.0, 1.5], 0.25),
        ([9.0, 2.0, 1.0], 0.5),
        ([9.0, 9.0, 9.0, 9.0, 9.0, 4.0, 3.0], 0.25),
    ],
)
def test_drop_over_the_last_quarter(values: list[float], wanted: float | None) -> None:
    assert last_quarter_drop(values) == (None if wanted is None else pytest.approx(wanted))


def test_history_of_a_log() -> None:
    records = [{"nll": 2.0 - 0.1 * i, "penalty": 0.5, "kl": 10.0 + i} for i in range(8)]
    found = history_of(records)
    assert found is not None
    assert (found.epochs, found.penalty[0], found.kl[-1]) == (8, 0.5, 17.0)
    assert found.nll_drop == pytest.approx((1.5 - 1.3) / 1.5)
    assert history_of([]) is None
    assert history_of([{"nll": 1.0, "penalty": 0.0, "kl": None}]).kl == [None]  # type: ignore[union-attr]
