"""Fast strategies against the plain loop: the very same draws where weights are drawn, else the same distribution."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.stats import ks_2samp
from torch import Tensor, nn

import credo
from credo.predict.safe_forward import Passes
from credo.predict.strategies import Activation, choose_strategy

WIDE = {"data_size": 10, "std_init": 0.3}


@torch.no_grad()
def many_outputs(posterior: credo.Posterior, x: Tensor, name: str, *, count: int, seed: int) -> Tensor:
    posterior.eval()
    plan = choose_strategy(posterior, x, name=name, draws=count, shared=False, seed=0)
    with posterior.seeded(seed):
        plan.restart()
        return plan.outputs(x, count)


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


STACKABLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 4)), (3,)),
    "no bias": (lambda: nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh(), nn.Linear(5, 4)), (3,)),
    "bare": (lambda: nn.Linear(3, 4), (3,)),
    "normed": (Normed, (3,)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 4)), (2, 8)),
    "conv2d": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, stride=2, padding=1, dilation=2, padding_mode="circular"),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(27, 4),
        ),
        (2, 8, 8),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 3, padding="same"), nn.Tanh(), nn.Flatten(), nn.Linear(54, 4)),
        (1, 3, 3, 3),
    ),
}


@pytest.mark.parametrize("name", STACKABLE)
@pytest.mark.parametrize("method", ["bbb", "ensemble of bbb", "ensemble of map"])
def test_stacked_gives_the_very_draws_of_the_loop(name: str, method: str) -> None:
    build, shape = STACKABLE[name]
    torch.manual_seed(0)
    if method == "bbb":
        posterior: credo.Posterior = credo.BBB(build(), **WIDE)
    elif method == "ensemble of bbb":
        posterior = credo.Ensemble([credo.BBB(build(), **WIDE) for _ in range(3)])
    else:
        posterior = credo.Ensemble([credo.MAP(build(), data_size=10) for _ in range(3)])
    x = torch.randn(9, *shape)
    for shared in (False, True):
        options: dict[str, Any] = {"draws": 13, "batch_size": 4, "shared_draws": shared, "seed": 3}
        loop = credo.predict(posterior, x, strategy="loop", **options)
        stacked = credo.predict(posterior, x, strategy="stacked", **options)
        torch.testing.assert_close(stacked.probs, loop.probs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(stacked.epistemic_by_class, loop.epistemic_by_class, rtol=1e-4, atol=1e-6)
    assert loop.epistemic.min() > 1e-4


def test_only_some_parameters_of_the_first_layer_random(x: Tensor, mlp: Callable[..., nn.Module]) -> None:
    for random in (["0.weight", "2.*"], ["0.bias", "2.*"], ["0.bias"]):
        posterior = credo.BBB(mlp(), random=random, **WIDE)
        loop, stacked = (credo.predict(posterior, x, draws=12, strategy=s).probs for s in ("loop", "stacked"))
        torch.testing.assert_close(stacked, loop)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "mlp": (STACKABLE["linear"][0], (3,), {}),
    "bare": (STACKABLE["bare"][0], (3,), {}),
    "normed": (Normed, (3,), {}),
    "no bias": (STACKABLE["no bias"][0], (3,), {}),
    "weight only": (STACKABLE["linear"][0], (3,), {"random": ["0.weight", "2.weight"]}),
    "bias only": (STACKABLE["linear"][0], (3,), {"random": ["0.bias"]}),
    "conv": (STACKABLE["conv2d"][0], (2, 8, 8), {}),
}


@pytest.mark.parametrize(
    ("family", "strategy"),
    [(f, "activation") for f in FAMILIES if f != "conv"] + [("mlp", "stacked"), ("conv", "stacked")],
)
def test_same_distribution_as_the_loop(family: str, strategy: str) -> None:
    """Kolmogorov-Smirnov on 1,500 draws: each output alone and mixtures of them, which see how they vary together.

    False-alarm rate below 2e-4: 15 tests (3 inputs × 5 directions), each at 1e-5.
    """
    build, shape, options = FAMILIES[family]
    torch.manual_seed(1)
    posterior = credo.BBB(build(), **WIDE, **options)
    x = torch.randn(3, *shape)
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
    posterior = credo.BBB(nn.Linear(3, 4, bias=bias), data_size=10, rho_init=(-1.0, 0.5))
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
    """Independent noise for the rows of one input, which the engine refuses: the test has the power to see it."""
    network = Patches()
    nn.init.constant_(network.last.weight, 0.1)  # the three rows add up: three times the variance if they are one
    posterior = credo.BBB(network, random="first.*", **WIDE)
    x = torch.ones(1, 3)
    slow = many_outputs(posterior, x, "loop", count=1500, seed=1)
    wrong = Activation(posterior, "first", posterior.model.first, Passes())
    with torch.no_grad(), posterior.seeded(2):
        fast = wrong.outputs(x, 1500)
    assert ks_2samp(slow[:, 0, 0], fast[:, 0, 0]).pvalue < 1e-5
