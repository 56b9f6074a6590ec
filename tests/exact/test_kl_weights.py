"""How much the KL counts at each step."""

from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from credo.core.kl_schedule import KL_WEIGHTS, KLTerm
from credo.methods import BBB


def make(name: str, **options):
    return KLTerm(weight=name, **options).schedule()


@pytest.mark.parametrize("name", ["uniform", "blundell"])
@pytest.mark.parametrize("batches", [1, 2, 5, 49, 2000])
def test_mean_over_each_epoch_is_one(name: str, batches: int) -> None:
    weight = make(name, batches=batches)
    for epoch in range(3):
        total = sum(weight(step) for step in range(epoch * batches, (epoch + 1) * batches))
        assert total / batches == pytest.approx(1.0, rel=1e-12)


def test_blundell_shares_of_five_batches_are_the_integer_fractions() -> None:
    weight = make("blundell", batches=5)
    shares = [Fraction(2 ** (5 - i), 2**5 - 1) for i in range(1, 6)]
    assert sum(shares) == 1
    for epoch in range(2):
        assert [weight(5 * epoch + i) for i in range(5)] == pytest.approx([float(5 * s) for s in shares], rel=1e-15)


def test_blundell_of_two_thousand_batches_is_finite_and_halves() -> None:
    weight = make("blundell", batches=2000)
    values = [weight(step) for step in range(2000)]
    assert values[:4] == [1000.0, 500.0, 250.0, 125.0]
    assert all(0 <= value < float("inf") for value in values)


def test_uniform_and_constant_are_one_at_every_step() -> None:
    assert [make("constant")(step) for step in (0, 1, 1000)] == [1.0, 1.0, 1.0]
    assert [make("uniform", batches=7)(step) for step in (0, 1, 1000)] == pytest.approx([1.0, 1.0, 1.0])


def test_warmup_is_linear_and_then_one() -> None:
    weight = make("warmup", warmup_steps=4)
    assert [weight(step) for step in range(7)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("blundel", {}, "Did you mean 'blundell'"),
        ("blundell", {}, "needs batches"),
        ("uniform", {"batches": 0}, "needs batches"),
        ("warmup", {"batches": 3}, "needs warmup_steps"),
        ("uniform", {"batches": 3, "warmup_steps": 4}, "warmup_steps=4 has no effect with kl_term.weight='uniform'"),
    ],
)
def test_bad_choices_are_refused_with_what_is_missing(name: str, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(name, **options)


@pytest.mark.parametrize("name", KL_WEIGHTS)
def test_bbb_weighs_the_kl_by_it_at_each_of_its_steps(name: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    options = {"batches": 3, "warmup_steps": 4 if name == "warmup" else None}
    posterior = BBB(nn.Linear(3, 2), data_size=30, kl_term={"weight": name, **options}, temperature=0.5)
    weight = make(name, **options)
    for step in range(5):
        terms = posterior.step(lambda net: F.cross_entropy(net(x), y))
        assert terms.penalty == pytest.approx(0.5 * weight(step) / 30 * terms.kl, rel=1e-6)
