"""FGSM and PGD: the closed-form optimum on linear networks, bounds kept exactly, restarts, targets, modes."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.attacks import fgsm, minimal, pgd, random_search, success_rate
from credo.attacks.balls import Ball
from credo.attacks.common import gradient_of, losses

CLASSES, FEATURES = 3, 12


def linear(seed: int = 0, *, classes: int = CLASSES) -> nn.Linear:
    torch.manual_seed(seed)
    net = nn.Linear(FEATURES, classes)
    balance_(net, net)
    return net


def inputs(count: int = 40, *, low: float = 0.3, high: float = 0.7, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(count, FEATURES, generator=generator)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    balance_(net, net[2])
    return net


@torch.no_grad()
def balance_(net: nn.Module, last: Any) -> None:
    """All classes equally likely at first, and differences of a few logits."""
    last.weight *= 10
    last.bias -= net(inputs()).mean(0)


def margin(net: Any, x: Tensor, y: Tensor) -> Tensor:
    scores = net(x).detach()
    return scores.scatter(1, y[:, None], -torch.inf).amax(1) - scores.gather(1, y[:, None])[:, 0]


@pytest.mark.parametrize("attack", [fgsm, pgd])
def test_the_best_point_of_a_cube_on_two_classes(attack: Any) -> None:
    """There the margin is linear, and best at a corner: it grows by ε·‖w‖₁."""
    net, x = linear(classes=2), inputs()
    y = net(x).argmax(1)
    found = attack(net, x, y, epsilon=0.1)
    difference = (net.weight[1] - net.weight[0]).abs().sum().item()
    torch.testing.assert_close(margin(net, found.inputs, y), margin(net, x, y) + 0.1 * difference)
    assert torch.equal(found.success, margin(net, found.inputs, y) > 0)


@pytest.mark.parametrize("attack", [fgsm, pgd])
def test_the_best_point_of_an_l2_ball_on_two_classes(attack: Any) -> None:
    """It grows by ε·‖w‖₂."""
    net, x = linear(classes=2), inputs()
    y = net(x).argmax(1)
    # PGD's way to the best direction is halved by a step as long as the radius.
    options = {"step_size": 0.25} if attack is pgd else {}
    found = attack(net, x, y, epsilon=0.25, norm="l2", **options)
    difference = (net.weight[1] - net.weight[0]).norm().item()
    torch.testing.assert_close(margin(net, found.inputs, y), margin(net, x, y) + 0.25 * difference)
    torch.testing.assert_close(found.distortion, torch.full((40,), 0.25 / FEATURES**0.5).double(), rtol=1e-5, atol=0)


def test_the_box_cuts_the_cube() -> None:
    net, x = linear(classes=2), inputs(low=0.0, high=1.0)
    y = net(x).argmax(1)
    toward = (net.weight[1] - net.weight[0]).detach() * torch.where(y == 0, 1.0, -1.0)[:, None]
    corner = torch.where(toward > 0, (x + 0.4).clamp(max=1), (x - 0.4).clamp(min=0))
    torch.testing.assert_close(pgd(net, x, y, epsilon=0.4).inputs, corner)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_targets(norm: str) -> None:
    net, x = linear(), inputs()
    y = net(x).argmax(1)
    targets = (y + 1) % CLASSES
    radius = {"linf": 0.1, "l2": 0.3}[norm]
    found = pgd(net, x, y, epsilon=radius, norm=norm, targets=targets)
    assert torch.equal(found.success, net(found.inputs).argmax(1) == targets)
    anywhere = pgd(net, x, y, epsilon=radius, norm=norm)
    assert 0.3 < float(found.success.float().mean()) <= float(anywhere.success.float().mean())


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-9, 0.03, 0.1, 8 / 255, 0.5 - 2**-54, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_rounding_leads_outside(norm: str, epsilon: float, dtype: torch.dtype) -> None:
    """Exact comparison: the differences of such numbers are exact in float64 (half of that for float64 itself)."""
    generator = torch.Generator().manual_seed(0)
    bounds = (-0.1, 1.1)
    x = (torch.rand(50, 30, generator=generator, dtype=torch.float64) * 1.19 - 0.095).to(dtype)
    x[:, 0], x[:, 1] = 1e-7, 0.0
    ball = Ball(x, epsilon, norm, bounds)
    for candidate in (
        x + torch.randn(50, 30, generator=generator, dtype=torch.float64).to(dtype),
        x - 5,
        x + 5,
        x,
        ball.random(generator),
    ):
        found = ball.project(candidate)
        difference = found.double() - x.double()
        length = difference.abs().amax(1) if norm == "linf" else difference.square().sum(1).sqrt()
        assert bool((length <= epsilon).all())
        assert float(found.double().min()) >= bounds[0]
        assert float(found.double().max()) <= bounds[1]


def test_projections_are_not_shorter_than_they_must_be() -> None:
    x, away = inputs(), inputs(seed=2) + 2
    ball = Ball(x, 0.2, "l2", (-9, 9))
    torch.testing.assert_close((ball.project(away) - x).norm(dim=1), torch.full((40,), 0.2), rtol=1e-6, atol=0)
    near = x + 0.001
    assert torch.equal(ball.project(near), near)
    assert torch.equal(Ball(x, 0.2, "linf", (-9, 9)).project(near), near)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_attacks_stay_inside_exactly(norm: str) -> None:
    net, x = network(), inputs(low=0.0, high=1.0)
    y = net(x).argmax(1)
    for found in (fgsm(net, x, y, epsilon=0.1, norm=norm), pgd(net, x, y, epsilon=0.1, norm=norm, restarts=2)):
        difference = found.inputs.double() - x.double()
        assert float(difference.abs().max() if norm == "linf" else difference.norm(dim=1).max()) <= 0.1
        assert float(found.inputs.min()) >= 0.0
        assert float(found.inputs.max()) <= 1.0
        torch.testing.assert_close(found.distortion, difference.square().mean(1).sqrt())


def test_random_points_fill_the_ball() -> None:
    """In d dimensions the radius over ε, to the power d, is uniform; of 2000 the mean is off by 0.02 once in 1000."""
    x = torch.full((2000, 3), 0.5, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    radius = (Ball(x, 0.2, "l2", (0, 1)).random(generator) - x).norm(dim=1) / 0.2
    assert abs(float((radius**3).mean()) - 0.5) < 0.02
    cube = (Ball(x, 0.2, "linf", (0, 1)).random(generator) - x) / 0.2
    assert abs(float(cube.mean())) < 0.03
    assert abs(float(cube.square().mean()) - 1 / 3) < 0.02


def test_restarts_and_steps_only_help() -> None:
    net, x = network(), inputs(200, low=0.0, high=1.0)
    y = net(x).argmax(1)
    options: dict[str, Any] = {"epsilon": 0.05, "steps": 3}
    once = pgd(net, x, y, **options)
    several = pgd(net, x, y, restarts=4, **options)
    # The first restart begins where the only one did.
    assert bool((margin(net, several.inputs, y) >= margin(net, once.inputs, y)).all())
    assert bool((margin(net, several.inputs, y) > margin(net, once.inputs, y)).any())
    assert once.queries.tolist() == [5] * 200
    assert several.queries.tolist() == [17] * 200


def test_seeds() -> None:
    net, x = network(), inputs()
    y = net(x).argmax(1)
    state = torch.get_rng_state()
    first, second, other = (pgd(net, x, y, epsilon=0.05, steps=2, seed=seed).inputs for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_margin_loss_sees_through_saturation() -> None:
    """Logits times 10⁴ leave no gradient of the cross-entropy in float32, and the same labels."""
    net, x = network(), inputs()
    y = net(x).argmax(1)

    def sure(x: Tensor) -> Tensor:
        return net(x) * 1e4

    honest = pgd(net, x, y, epsilon=0.15, random_start=False).success.float().mean()
    blind = pgd(sure, x, y, epsilon=0.15, random_start=False).success.float().mean()
    seeing = pgd(sure, x, y, epsilon=0.15, random_start=False, loss="margin").success.float().mean()
    assert honest > 0.5
    assert blind < 0.2 < seeing
    assert seeing >= honest - 0.05


def test_gradients_of_several_draws_are_averaged() -> None:
    nets, x = [linear(seed) for seed in range(3)], inputs(5)
    y = torch.tensor([0, 1, 2, 0, 1])

    def together(x: Tensor) -> Tensor:
        return torch.stack([net(x) for net in nets])

    found, _, _ = gradient_of(together, x, lambda outputs: losses(outputs, y, None, "cross-entropy"))
    each = []
    for net in nets:
        leaf = x.clone().requires_grad_()
        F.cross_entropy(net(leaf), y, reduction="sum").backward()
        each.append(leaf.grad)
    torch.testing.assert_close(found, torch.stack(each).mean(0))
    assert all(parameter.grad is not None for parameter in nets[0].parameters())


def test_modes_gradients_and_statistics_are_left_alone() -> None:
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    net[2].eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x = inputs()
    first = pgd(net, x, torch.zeros(40, dtype=torch.int64), epsilon=0.1, steps=2)
    assert [module.training for module in net.modules()] == [True, True, True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(first.success, net.eval()(first.inputs).argmax(1) != 0)


def test_progress_and_batches() -> None:
    net, x = network(), inputs()
    y = net(x).argmax(1)
    seen: list[tuple[int, int]] = []
    parts = fgsm(net, x, y, epsilon=0.1, batch_size=16, on_progress=lambda *state: seen.append(state))
    assert seen == [(16, 40), (32, 40), (40, 40)]
    torch.testing.assert_close(parts.inputs, fgsm(net, x, y, epsilon=0.1).inputs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epsilon": -0.1}, "epsilon=-0.1"),
        ({"norm": "l1"}, "Unknown norm 'l1'"),
        ({"steps": 0}, "steps=0"),
        ({"loss": "hinge"}, "Unknown loss 'hinge'"),
        ({"bounds": (0.5, 1.0)}, "outside bounds"),
        ({"bounds": (1.0, 0.0)}, "the lower must be less"),
        ({"x": torch.full((4, FEATURES), torch.nan)}, "outside bounds"),
        ({"x": torch.ones(4, FEATURES, dtype=torch.int64)}, "real numbers"),
        ({"y": torch.zeros(3, dtype=torch.int64)}, r"labels must be integers \[4\]"),
        ({"y": torch.tensor([0, -1, 1, 0])}, "labels start at -1; classes are counted from 0"),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, "A target equals its label"),
        ({"logits": lambda x: x.detach()}, "random_search"),
        ({"logits": lambda x: x[:, :1]}, "two classes or more"),
        ({"logits": lambda x: x * torch.nan}, "NaN"),
    ],
)
def test_refusals(change: dict[str, Any], words: str) -> None:
    x, y = inputs(4), torch.zeros(4, dtype=torch.int64)
    arguments: dict[str, Any] = {"logits": linear(), "x": x, "y": y, "epsilon": 0.1, **change}
    with pytest.raises((ValueError, credo.NonFiniteError), match=words):
        pgd(arguments.pop("logits"), arguments.pop("x"), arguments.pop("y"), **arguments)


@pytest.mark.parametrize(
    "attack",
    [
        partial(fgsm, epsilon=0.1),
        partial(pgd, epsilon=0.1, loss="margin"),
        partial(random_search, epsilon=0.1, steps=2),
        minimal,
        partial(minimal, targets=None),
        success_rate,
    ],
)
def test_labels_that_the_function_has_no_class_for_are_refused(attack: Any) -> None:
    with pytest.raises(ValueError, match="labels run to 6, but the function has 3 classes, 0 to 2"):
        attack(linear(), inputs(4), torch.tensor([0, 6, 1, 3]))
    with pytest.raises(ValueError, match="targets run to 3, but the function has 3 classes"):
        attack(linear(), inputs(4), torch.tensor([0, 2, 1, 0]), targets=torch.tensor([1, 1, 3, 1]))


def test_a_posterior_itself_is_refused() -> None:
    posterior = credo.MAP(linear(), data_size=10)
    with pytest.raises(ValueError, match="posterior_logits"):
        fgsm(posterior, inputs(4), torch.zeros(4, dtype=torch.int64), epsilon=0.1)
