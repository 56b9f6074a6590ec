"""Figures as files: the same seed the same bytes, all suffixes, numbers that belong to the picture."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.font_manager  # noqa: F401 - looks for fonts once, before the cache folder is an empty one
import pytest
import torch

from credo.methods import MAP
from reproductions.figures import FIGURES
from reproductions.vogn import boundary_figure
from reproductions.vogn.boundary_figure import BoundaryFigure, Panel, boundary, boundary_numbers

Call = Callable[..., Any]
Rejected = Callable[..., str]
SMOKE = ("figure", "boundary", "--scale", "smoke")


@pytest.fixture(scope="module")
def figure() -> BoundaryFigure:
    """Trained once for all tests of the arrays."""
    return boundary(epochs=4, step_draws=2, draws=6, grid=30, points=60)


@pytest.mark.slow
def test_a_picture_and_its_path(call: Call) -> None:
    result = call(*SMOKE)
    assert result.stdout == "boundary.png\n"
    assert Path("boundary.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    first = Path("boundary.png").read_bytes()
    call(*SMOKE, "--out", "sub/again.png")
    assert Path("sub/again.png").read_bytes() == first
    call(*SMOKE, "--out", "other.png", "--seed", 1)
    assert Path("other.png").read_bytes() != first


@pytest.mark.slow
def test_a_vector_picture_is_the_same_bytes_each_time(call: Call) -> None:
    found = json.loads(call(*SMOKE, "--out", "a.svg", "--json").stdout)
    assert (found["figure"], found["scale"], found["seed"]) == ("a.svg", "smoke", 0)
    assert list(found["panels"]) == ["Adam", "VOGN"]
    call(*SMOKE, "--out", "b.svg")
    assert Path("a.svg").read_bytes() == Path("b.svg").read_bytes()
    assert "boundary of the mean" in Path("a.svg").read_text()


def test_what_there_is(call: Call) -> None:
    assert "boundary" in call("figure", "list").stdout
    assert list(json.loads(call("figure", "list", "--json").stdout)) == list(FIGURES)


@pytest.mark.slow
def test_uncertainty_as_a_picture_with_its_numbers(call: Call) -> None:
    asked = ("figure", "uncertainty", "--scale", "smoke")
    found = json.loads(call(*asked, "--out", "u.svg", "--json").stdout)
    assert (found["figure"], found["scale"], found["seed"]) == ("u.svg", "smoke", 0)
    first, last = (found["panels"]["training"][when] for when in ("first", "last"))
    assert first["train_accuracy"] != last["train_accuracy"]
    for epoch in (first, last):
        assert epoch["softmax"]["aleatoric"] > epoch["softmax"]["epistemic"] > 0
    assert len(found["panels"]["turned"]["epistemic"]) == len(found["panels"]["turned"]["degrees"]) == 7
    assert "<svg" in Path("u.svg").read_text()
    call(*asked, "--out", "again.svg")
    assert Path("again.svg").read_bytes() == Path("u.svg").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bondary",), "Unknown figure 'bondary'. Did you mean 'boundary'?"),
        (("boundary", "--scale", "papre"), "Unknown scale 'papre'. Did you mean 'paper'?"),
        (("boundary", "--out", "picture.bmp"), "--out picture.bmp: the name must end in .png, .svg, .pdf"),
    ],
)
def test_wrong_names(rejected: Rejected, arguments: tuple[str, ...], message: str) -> None:
    assert message in rejected("figure", *arguments)
    assert list(Path().glob("*.png")) == []


def test_the_arrays(figure: BoundaryFigure) -> None:
    adam, vogn = figure.panels
    assert figure.points.shape == (60, 2)
    assert set(figure.labels.tolist()) == {0, 1}
    assert (adam.draws.shape, vogn.draws.shape) == ((1, 30, 30), (6, 30, 30))
    assert torch.equal(adam.draws[0], adam.mean), "a point estimate has one network"
    assert not torch.equal(vogn.draws[0], vogn.draws[1])
    averaged = vogn.draws.double().mean(0)
    entropy = -(averaged * averaged.log() + (1 - averaged) * (1 - averaged).log())
    torch.testing.assert_close(vogn.entropy.double(), entropy, rtol=1e-4, atol=1e-6)
    assert float(vogn.entropy.max()) <= math.log(2) + 1e-6 < boundary_figure.LEVELS[-1]


def test_the_same_seed_the_same_arrays(figure: BoundaryFigure) -> None:
    again = boundary(epochs=4, step_draws=2, draws=6, grid=30, points=60)
    for one, other in zip(figure.panels, again.panels, strict=True):
        assert torch.equal(one.draws, other.draws)


def test_numbers_of_a_picture_that_is_known() -> None:
    """Class 1 lies right of zero; one draw is right, the other is its mirror image."""
    axis = torch.linspace(-2, 2, 5)
    right = (axis > 0.5).float().expand(5, 5)
    panel = Panel("known", right, torch.stack([right, 1 - right]), torch.full((5, 5), 0.25))
    points, labels = torch.tensor([[1.1, -1.0], [-1.0, 1.9], [2.0, 0.2], [-2.0, -2.0]]), torch.tensor([1, 0, 1, 1])
    numbers = boundary_numbers(BoundaryFigure(points, labels, axis, (panel,)))
    assert numbers == {"known": {"mean_accuracy": 0.75, "draw_accuracy": 0.5, "entropy": 0.25}}


def test_axes_are_not_swapped() -> None:
    """Trained on classes left and right of a line, the picture changes from left to right, not from below to above."""
    net = torch.nn.Linear(2, 1)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[5.0, 0.0]]))
        net.bias.zero_()
    panel = boundary_figure._panel("", MAP(net, data_size=1, likelihood="bernoulli"), torch.linspace(-1, 1, 4), 1, 0)
    assert (panel.mean[:, 0] < 0.1).all()
    assert (panel.mean[:, -1] > 0.9).all()
