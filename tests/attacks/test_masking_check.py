"""The masking check: silent on honest networks, and it names what is wrong with deliberately masked ones."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.attacks import MaskingReport, check_masking, pgd, random_search

EPSILON = 0.15


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """Three clouds in eight dimensions, learned well; a ball of radius 0.15 breaks some of them."""
    torch.manual_seed(0)
    centres = 0.3 + 0.4 * torch.rand(3, 8)
    y = torch.arange(150) % 3
    x = (centres[y] + 0.05 * torch.randn(150, 8)).clamp(0, 1)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    assert float((net(x).argmax(1) == y).double().mean()) > 0.97
    return net, x, y


def check(function: Any, x: Tensor, y: Tensor, **options: Any) -> MaskingReport:
    return check_masking(function, x, y, epsilon=EPSILON, **{"steps": 10, "search_steps": 100, **options})


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_an_honest_network(trained: tuple[nn.Module, Tensor, Tensor], norm: str) -> None:
    net, x, y = trained
    seen: list[tuple[int, int]] = []
    report = check(net, x, y, norm=norm, on_progress=lambda *state: seen.append(state))
    assert report.findings == ()
    assert not report.masked
    assert report.blind == 0
    assert report.accuracies["clean"] > 0.97 > report.accuracies["many steps"] + 0.02
    assert report.accuracies["unbounded"] == 0
    assert seen == [(done, 6) for done in range(1, 7)]
    assert str(report).startswith("No sign of masked gradients")


def test_saturated_logits(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, x, y = trained
    report = check(lambda x: net(x) * 1e5, x, y)
    assert report.masked
    assert report.blind > 0.9
    assert any("exactly zero" in finding for finding in report.findings)
    assert any("without gradients is stronger" in finding for finding in report.findings)
    assert any("Without a bound" in finding for finding in report.findings)
    assert str(report).startswith("Do not trust the gradient attacks")


def test_rounded_inputs(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    """Inputs cut into eight steps, with a gradient that is there but points anywhere."""
    net, x, y = trained
    torch.manual_seed(1)
    wrong = torch.randn(8, 8)

    def quantised(x: Tensor) -> Tensor:
        misleading = x @ wrong
        return net((x * 8).round() / 8 + misleading - misleading.detach())

    report = check(quantised, x, y)
    assert report.blind == 0
    assert report.masked
    assert any("without gradients is stronger" in finding for finding in report.findings)


def test_more_steps_that_are_weaker(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    """A function that notices being looked at often, and answers rightly then."""
    net, x, y = trained
    looks = 0

    def wary(x: Tensor) -> Tensor:
        nonlocal looks
        looks += 1
        return net(x) if looks < 20 else F.one_hot(y, 3) + net(x) * 1e-6

    report = check(wary, x, y)
    assert any("More steps are weaker" in finding for finding in report.findings)


def test_transfer(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, x, y = trained
    stolen = pgd(net, x, y, epsilon=EPSILON).inputs
    report = check(lambda x: net(x) * 1e5, x, y, transfer=stolen)
    assert any("An attack on another network is stronger" in finding for finding in report.findings)
    assert check(net, x, y, transfer=stolen).findings == ()


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_random_search(trained: tuple[nn.Module, Tensor, Tensor], norm: str) -> None:
    """Never outside, better than nothing, better with more time, and not better than a good gradient attack."""
    net, x, y = trained
    found = [random_search(net, x, y, epsilon=EPSILON, norm=norm, steps=steps) for steps in (1, 200)]
    white = pgd(net, x, y, epsilon=EPSILON, norm=norm, restarts=2)
    shares = [float(r.success.double().mean()) for r in (*found, white)]
    assert shares[0] < shares[1] <= shares[2] + 0.02
    difference = found[1].inputs.double() - x.double()
    assert float(difference.abs().max() if norm == "linf" else difference.norm(dim=1).max()) <= EPSILON
    assert found[1].queries.tolist() == [203] * 150
    again = random_search(net, x, y, epsilon=EPSILON, norm=norm, steps=200)
    assert torch.equal(again.inputs, found[1].inputs)


def test_random_search_on_images() -> None:
    """Windows of each image: with one step, what changed beyond the first guess is a rectangle."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(2 * 6 * 6, 3))
    x = torch.rand(20, 2, 6, 6)
    y = net(x).argmax(1)
    found = random_search(net, x, y, epsilon=0.3, steps=150)
    assert float(found.success.double().mean()) > 0.8
    assert float((found.inputs - x).abs().max()) <= 0.3 + 1e-6


def test_refusals(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, x, y = trained
    with pytest.raises(ValueError, match="tolerance=1"):
        check(net, x, y, tolerance=1.0)
    with pytest.raises(ValueError, match="must be finite"):
        check(net, x, y, bounds=(0.0, float("inf")))
