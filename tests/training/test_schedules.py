"""Schedules against values worked out by hand."""

import itertools
import math

import pytest
import torch
from torch import nn

import credo
from credo.training import make_schedule


def test_constant() -> None:
    scale = make_schedule(epochs=3)
    assert [scale(t) for t in (0.0, 1.5, 3.0, 10.0)] == [1.0] * 4


def test_steps_drop_at_their_milestones() -> None:
    scale = make_schedule("steps", epochs=10, milestones=[6, 3], decay=0.5)
    times = [0.0, 2.999, 3.0, 5.999, 6.0, 9.9]
    assert [scale(t) for t in times] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_cosine_from_one_to_its_floor() -> None:
    scale = make_schedule("cosine", epochs=8)
    assert scale(0) == 1
    assert scale(2) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert scale(4) == pytest.approx(0.5)
    assert scale(8) == pytest.approx(0, abs=1e-15)
    assert scale(9) == pytest.approx(0, abs=1e-15)  # past its end it stays there
    floored = make_schedule("cosine", epochs=8, floor=0.2)
    assert [floored(t) for t in (0, 4, 8)] == pytest.approx([1.0, 0.6, 0.2])


def test_warmup_goes_before_all_of_them() -> None:
    constant = make_schedule(epochs=10, warmup=2)
    assert [constant(t) for t in (0, 0.5, 1, 2, 7)] == pytest.approx([0, 0.25, 0.5, 1, 1])
    cosine = make_schedule("cosine", epochs=10, warmup=2)
    # Half a cosine over the eight epochs that are left.
    assert [cosine(t) for t in (1, 2, 6, 10)] == pytest.approx([0.5, 1, 0.5, 0], abs=1e-15)
    steps = make_schedule("steps", epochs=10, milestones=[1], decay=0.1, warmup=2)
    assert [steps(t) for t in (0.5, 1, 3)] == pytest.approx([0.25, 0.05, 0.1])
    assert make_schedule("cosine", epochs=2, warmup=2)(1) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cosin", {}, "Did you mean 'cosine'"),
        ("steps", {}, "needs milestones"),
        ("constant", {"warmup": -1}, "warmup=-1"),
        ("constant", {"warmup": 6}, "between 0 and epochs=5"),
        ("plateau", {"milestones": [3]}, r"no milestones, and milestones=\[3\].*choose schedule='steps'"),
        ("cosine", {"wait": 3}, "no wait, and wait=3 was given.*schedule='plateau'"),
        ("steps", {"milestones": [3], "floor": 0.1}, "schedule='cosine' or 'plateau'"),
        ("constant", {"decay": 0.5}, "schedule='steps' or 'plateau'"),
    ],
)
def test_impossible_schedules(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(name, epochs=5, **options)


def test_the_optimiser_gets_the_scheduled_rate() -> None:
    """Plain gradient descent on loss = w: every step moves the weight by its rate."""
    network = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(network.weight)
    posterior = credo.MAP(network, data_size=1, optimizer="sgd", lr=1.0)
    places = [0.0]

    def look(epoch: int, done: int, total: int, terms: credo.Terms) -> None:
        places.append(network.weight.item())

    schedule = make_schedule("cosine", epochs=2)
    records = list(
        credo.train(
            posterior,
            [None] * 4,
            epochs=2,
            schedule=schedule,
            nll=lambda net, batch: net(torch.ones(1, 1)).sum(),
            on_step=look,
        )
    )
    moved = [before - after for before, after in itertools.pairwise(places)]
    expected = [(1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert moved == pytest.approx(expected, abs=1e-6)
    # A record names a rate that a step of its epoch had, the last one.
    assert [record.lr_scale for record in records] == pytest.approx([expected[3], expected[7]])


def test_by_default_training_warms_up_and_falls_along_a_cosine() -> None:
    rates = []

    def look(epoch: int, done: int, total: int, terms: credo.Terms) -> None:
        rates.append(posterior.lr_scale)

    posterior = credo.MAP(nn.Linear(1, 1), data_size=1)
    loss = lambda net, batch: net(torch.ones(1, 1)).sum()  # noqa: E731
    credo.fit(posterior, [None] * 20, epochs=2, nll=loss, on_step=look, progress=False)
    expected = make_schedule("cosine", epochs=2, warmup=0.1)
    assert rates == pytest.approx([expected(step / 20) for step in range(40)])
    assert rates[0] == 0
    assert max(rates) == rates[2] == 1
    assert rates[-1] < 0.01
