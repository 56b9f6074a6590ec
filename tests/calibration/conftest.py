"""Tiny posteriors whose predictions are known to be wrong in a known way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo import BBB, MAP, Ensemble, MCDropout, NodeBNN, NoisyKFAC, Posterior
from credo.methods import VOGN

Batches = list[tuple[Tensor, Tensor]]


def make_network(outputs: int = 3, *, seed: int = 0, gain: float = 1.0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))
    with torch.no_grad():
        dict(network.named_parameters())["2.weight"].mul_(gain)
    return network


def make_rows(count: int, *, temperature: float = 1.0, gain: float = 6.0, seed: int = 1) -> Batches:
    """Labels drawn from the network `make_network(gain=gain)` at a temperature."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    with torch.no_grad():
        probs = (make_network(gain=gain)(x) / temperature).softmax(-1)
    y = torch.multinomial(probs, 1, generator=generator).squeeze(-1)
    return list(zip(x.split(50), y.split(50), strict=True))


def make_value_rows(count: int, *, std: float, targets: int = 1, seed: int = 1) -> Batches:
    """Targets around the outputs of `make_network(targets)`, with Gaussian noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    with torch.no_grad():
        mean = make_network(targets)(x)
    y = mean + std * torch.randn(count, targets, generator=generator)
    return list(zip(x.split(50), y.split(50), strict=True))


def steps(posterior: Posterior, count: int = 2) -> Posterior:
    x, y = make_rows(40)[0]
    for _ in range(count):
        posterior.step(lambda net: nn.functional.cross_entropy(net(x), y))
    return posterior


BUILDERS: dict[str, Callable[[], Posterior]] = {
    "map": lambda: MAP(make_network(gain=6.0), data_size=40),
    "bbb": lambda: BBB(make_network(gain=6.0), data_size=40, init=0.2),
    "vogn": lambda: steps(VOGN(make_network(gain=6.0), data_size=40, lr=1e-3)),
    "noisy-kfac": lambda: steps(NoisyKFAC(make_network(gain=6.0), data_size=40, lr=1e-3)),
    "mc-dropout": lambda: MCDropout(make_network(gain=6.0), data_size=40, rate=0.3),
    "node-bnn": lambda: NodeBNN(make_network(gain=6.0), data_size=40, components=2, nodes="both"),
    "ensemble of map": lambda: Ensemble([MAP(make_network(gain=6.0, seed=i), data_size=40, seed=i) for i in range(2)]),
    "ensemble of bbb": lambda: Ensemble(
        [BBB(make_network(gain=6.0, seed=i), data_size=40, init=0.2, seed=i) for i in range(2)]
    ),
}


@pytest.fixture(params=BUILDERS)
def posterior(request: pytest.FixtureRequest) -> Posterior:
    return BUILDERS[request.param]()


@pytest.fixture
def network() -> Callable[..., nn.Sequential]:
    return make_network


@pytest.fixture
def rows() -> Callable[..., Batches]:
    return make_rows


@pytest.fixture
def value_rows() -> Callable[..., Batches]:
    return make_value_rows


@pytest.fixture
def nll() -> Callable[..., float]:
    """Mean NLL of a prediction of these batches."""

    def measured(posterior: Any, batches: Batches, **options: Any) -> float:
        return float(credo.measure(credo.predict(posterior, batches, **options), intervals=False)["nll"])

    return measured
