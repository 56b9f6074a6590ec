"""Sampled activations against the plain loop: the same distribution for each input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.stats import ks_2samp
from torch import Tensor, nn

import credo
from credo.predict.draw_loop import draw_loop, run_draws
from credo.predict.first_layer_sampling import FirstLayer

WIDE = {"data_size": 10, "init": 0.3}


@torch.no_grad()
def many_outputs(posterior: credo.Posterior, x: Tensor, strategy: str, *, count: int, seed: int) -> Tensor:
    posterior.eval()
    loop = draw_loop(posterior, x, draws=count, shared=False, strategy=strategy)
    assert (loop.first_layer is None) == (strategy == "loop")
    with posterior.seeded(seed):
        loop.begin()
        return loop.outputs(x, count)


class Normed(nn.Module):
    """BatchNorm on the inputs, whose affine parameters are no random ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm1d(3), nn.Linear(3, 5), nn.Linear(5, 4)
        self.norm.running_mean += 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(self.norm(x))))


class Patches(nn.Module):
    """Three pieces of an input go through the first layer as rows of their own, under the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 5), nn.Linear(15, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.reshape(-1, 1)).reshape(len(x), -1)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 4))


def scaled() -> nn.Module:
    """What comes before the first layer runs once for all draws."""
    norm = nn.BatchNorm1d(3, affine=False)
    norm.running_mean += 1.0
    return nn.Sequential(norm, nn.LeakyReLU(0.5, inplace=True), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
    "mlp": (mlp, "auto", {}),
    "scaled": (scaled, "auto", {}),
    "no bias": (lambda: nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh(), nn.Linear(5, 4)), "auto", {}),
    "weight only": (mlp, "auto", {"random": ["0.weight", "2.weight"]}),
    "bias only": (mlp, "auto", {"random": ["0.bias"]}),
    "bare": (lambda: nn.Linear(3, 4), "activation", {}),
    "normed": (Normed, "activation", {}),
    "last layer": (mlp, "activation", {"random": "last"}),
}


@pytest.mark.part(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_distribution_as_the_loop(family: str) -> None:
    """Kolmogorov-Smirnov on 1,500 draws: each output alone and mixtures of them, which see how they vary together.

    False-alarm rate below 2e-4: 15 tests (3 inputs × 5 directions), each at 1e-5.
    """
    build, strategy, options = FAMILIES[family]
    torch.manual_seed(1)
    posterior = credo.BBB(build(), **WIDE, **options)
    x = torch.randn(3, 3)
    slow = many_outputs(posterior, x, "loop", count=1500, seed=1)
    fast = many_outputs(posterior, x, strategy, count=1500, seed=2)
    directions = torch.cat([torch.eye(4)[:2], torch.randn(3, 4, generator=torch.Generator().manual_seed(0))])
    for i in range(len(x)):
        for direction in directions:
            assert ks_2samp(slow[:, i] @ direction, fast[:, i] @ direction).pvalue > 1e-5


@pytest.mark.parametrize("bias", [True, False])
def test_drawn_activations_have_their_closed_form(bias: bool) -> None:
    """Σ xᵢwᵢ + b is N(x·μ + μ_b, x²·σ² + σ_b²), independent for each row: 40,000 samples from ten passes.

    False-alarm rate 3e-5: mean, variance and correlation of four outputs, 14 numbers at five standard errors.
    """
    torch.manual_seed(0)
    posterior = credo.BBB(nn.Linear(3, 4, bias=bias), data_size=10, init={"rho": (-1.0, 0.5)})
    x = torch.tensor([0.5, -2.0, 1.0])
    outputs = many_outputs(posterior, x.expand(4000, 3), "activation", count=10, seed=1).flatten(0, 1)
    std = posterior.std()
    variance = std["weight"].square() @ x.square() + (std["bias"].square() if bias else 0)
    mean = posterior.model(x).detach()
    count = len(outputs)
    assert ((outputs.mean(0) - mean).abs() / (variance / count).sqrt()).max() < 5
    assert ((outputs.var(0) / variance - 1).abs() / (2 / count) ** 0.5).max() < 5
    correlation = torch.corrcoef(outputs.T) - torch.eye(4)
    assert correlation.abs().max() < 5 / count**0.5


def test_the_comparison_above_would_notice_a_wrong_distribution() -> None:
    """Independent noise for the rows of one input, which `predict` raises on: the test has the power to see it."""
    network = Patches()
    nn.init.constant_(network.last.weight, 0.1)  # the three rows add up: three times the variance if they are one
    posterior = credo.BBB(network, random="first.*", **WIDE)
    x = torch.ones(1, 3)
    slow = many_outputs(posterior, x, "loop", count=1500, seed=1)
    first = FirstLayer(posterior, "first")
    with torch.no_grad(), posterior.seeded(2), first.sampled(torch.ones(3, 3), passes=1500):  # as if of three inputs
        fast = run_draws(posterior, first.iter_draws(1500), x)
    assert ks_2samp(slow[:, 0, 0], fast[:, 0, 0]).pvalue < 1e-5
