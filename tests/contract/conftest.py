"""What every method is put through: builders for all of them, a batch, and one comparison of states."""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.posterior import Posterior
from credo.core.prior import ScaleMixture
from credo.methods import (
    BBB,
    HMC,
    IVON,
    KFAC,
    MAP,
    OGN,
    SGHMC,
    SGLD,
    SWAG,
    VOGN,
    Ensemble,
    Laplace,
    LastLayer,
    LowRankNoise,
    MCDropout,
    NodeBNN,
    NoisyKFAC,
)
from credo.methods import METHODS as REGISTERED

Network = Callable[[int], nn.Module]
Build = Callable[..., Posterior]


def of(method: type[Posterior], **fixed: Any) -> Build:
    def build(network: Network, *, data_size: int = 20, seed: int = 0, **options: Any) -> Posterior:
        return method(network(0), data_size=data_size, seed=seed, **{**fixed, **options})

    return build


def with_own_dropout(network: Network, *, data_size: int = 20, seed: int = 0, **options: Any) -> Posterior:
    model = nn.Sequential(network(0), nn.Dropout(0.3))
    return MCDropout(model, data_size=data_size, seed=seed, lr=0.05, **options)


def ensemble_of(method: type[Posterior], **fixed: Any) -> Build:
    def build(network: Network, *, data_size: int = 20, seed: int = 0, **options: Any) -> Posterior:
        chosen = {**fixed, **options}
        return Ensemble([method(network(i), data_size=data_size, seed=seed + i, **chosen) for i in range(2)])

    return build


@dataclass(frozen=True)
class Row:
    """A method, and what of the contract applies to it."""

    build: Build
    differs: bool = True
    """Whether two passes of a new posterior differ."""
    noisy: bool = True
    """Whether its training is random."""
    weights: bool = True
    """Whether its draws are weights."""
    kl: bool = False
    """Whether it reports a KL."""
    penalised: bool = False
    """Whether there is a gradient, of a penalty, even where the loss has none."""


def skeleton() -> type[Posterior]:
    """The class in CONTRIBUTING.md, as somebody who adds a method copies it."""
    text = Path(__file__).parents[2].joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")
    block = textwrap.dedent(text.split("```python\n")[1].split("```")[0])
    names: dict[str, Any] = {}
    exec(block, names)
    found: type[Posterior] = names["FixedNoise"]
    return found


SGD = {"optimizer": {"name": "sgd", "momentum": 0.9}}
DECAYED_SGD = {"optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01}}
METHODS: dict[str, Row] = {
    "map": Row(of(MAP, lr=0.05), differs=False, noisy=False),
    "map with prior": Row(of(MAP, lr=0.05, prior=1.0), differs=False, noisy=False, penalised=True),
    "mc-dropout own": Row(with_own_dropout, weights=False),
    "mc-dropout rate": Row(of(MCDropout, lr=0.05, rate=0.3), weights=False),
    "ensemble of map": Row(ensemble_of(MAP, lr=0.05), noisy=False),
    "ensemble of bbb": Row(ensemble_of(BBB, lr=0.05, init=0.1), kl=True),
    "bbb weights": Row(of(BBB, lr=0.05, init=0.1, draws=2), kl=True),
    "bbb lrt": Row(of(BBB, lr=0.05, init=0.1, noise="lrt"), kl=True),
    "bbb flipout": Row(of(BBB, lr=0.05, init=0.1, noise="flipout", draws=2, **SGD), kl=True),
    "bbb adversarial": Row(of(BBB, lr=0.05, init=0.1, noise="adversarial"), kl=True),
    "vogn": Row(of(VOGN, lr=0.05, draws=2, curvature={"init": 0.5}, prior_precision=2.0), kl=True),
    "vogn first at mean": Row(
        of(VOGN, lr=0.05, momentum={"averaged": True}, prior_precision={"*weight": 2.0, "*": 1.0}),
        differs=False,
        kl=True,
    ),
    "vogn adversarial": Row(of(VOGN, lr=0.05, curvature={"init": 0.5}, noise="adversarial"), kl=True),
    "ogn": Row(of(OGN, lr=0.05), differs=False, noisy=False),
    "ivon": Row(of(IVON, lr=0.3, draws=2, curvature=0.9), kl=True),
    "ivon squares": Row(
        of(IVON, lr={"*bias": 0.05, "*": 0.1}, curvature={"estimator": "squares"}, random="all", clip=0.5), kl=True
    ),
    "kfac": Row(of(KFAC, lr=0.05, curvature={"inverse_every": 2}), differs=False, noisy=False),
    "noisy-kfac": Row(
        of(NoisyKFAC, lr=0.05, draws=2, curvature={"inverse_every": 2}, prior_precision={"*weight": 2.0, "*": 1.0}),
        differs=False,
    ),
    "noisy-kfac sampled": Row(
        of(NoisyKFAC, lr={"*bias": 0.02, "*": 0.05}, curvature={"fisher": "sampled", "factor_every": 2}), differs=False
    ),
    "noisy-kfac eigenbasis": Row(
        of(NoisyKFAC, lr=0.05, curvature={"eigenbasis": True, "inverse_every": 2, "inverse_delay": 1}), differs=False
    ),
    "node-bnn": Row(of(NodeBNN, lr=0.05, draws=2, nodes={"bias_scale": True}, weight_prior=3.0), penalised=True),
    "node-bnn both batch": Row(
        of(
            NodeBNN, lr={"nodes.*": 0.01, "*": 0.05}, nodes="both", noise="batch", kl_term={"gamma": 0.5}, **DECAYED_SGD
        ),
        penalised=True,
    ),
    "ensemble of node-bnn": Row(ensemble_of(NodeBNN, lr=0.05, nodes="out", kl_term="mean"), penalised=True),
    "swag": Row(of(SWAG, lr=0.05, rank=3, batchnorm_draws=2), differs=False, noisy=False),
    "swag diagonal": Row(of(SWAG, lr=0.05, rank=0, every=2, start=1, prior=1.0), False, noisy=False, penalised=True),
    "ensemble of swag": Row(ensemble_of(SWAG, lr=0.05, rank=2), noisy=False),
    "sgld": Row(of(SGLD, lr=1e-3, burn_in=1, samples=3), differs=False, penalised=True),
    "sghmc": Row(of(SGHMC, lr=1e-3, burn_in=1, samples=3, every=2), differs=False, penalised=True),
    "sghmc plain": Row(
        of(SGHMC, lr={"*bias": 0.05, "*": 0.1}, precondition=False, prior=ScaleMixture(), burn_in=0, samples=2),
        differs=False,
        penalised=True,
    ),
    "ensemble of sghmc": Row(ensemble_of(SGHMC, lr=1e-3, burn_in=1, samples=2), penalised=True),
    "ensemble of vogn": Row(ensemble_of(VOGN, lr=0.05, curvature={"init": 0.5}), kl=True),
    "bbb relative spread": Row(of(BBB, lr=0.05, spread="relative", init={"relative_std": 0.3}, noise="lrt"), kl=True),
    "bbb one spread a layer": Row(
        of(BBB, lr=0.05, spread="relative-layer", init={"relative_std": 0.3}, draws=2), kl=True
    ),
    "laplace": Row(of(Laplace, lr=0.05), differs=False, noisy=False),
    "laplace diag": Row(
        of(Laplace, lr=0.05, structure="diag", random="all", prior=1.0), differs=False, noisy=False, penalised=True
    ),
    "last-layer": Row(of(LastLayer, lr=0.05), differs=False, noisy=False),
    "low-rank-noise": Row(of(LowRankNoise, lr=0.05), differs=False, noisy=False),
    "last-layer with prior": Row(of(LastLayer, lr=0.05, prior=1.0), differs=False, noisy=False, penalised=True),
    "hmc": Row(
        of(HMC, lr=0.05, chains=2, warmup=4, samples=4, settings={"thin": 1, "start_steps": 2, "max_steps": 4}),
        differs=False,
        noisy=False,
        penalised=True,
    ),
    "bbb scale mixture": Row(of(BBB, lr=0.05, init=0.1, prior=ScaleMixture(), noise="lrt"), kl=True),
    "skeleton": Row(of(skeleton(), lr=0.05, std=0.1)),
}


def default_row(method: type[Posterior]) -> Row:
    """Of a method without a row here: its default arguments, and the flags that follow from a new posterior."""
    takes_rate = "lr" in inspect.signature(method).parameters
    build = of(method, **({"lr": 0.05} if takes_rate else {}))
    posterior = build(lambda index: nn.Linear(4, 3))
    about = posterior.describe()
    return Row(build, differs=posterior.is_random, kl=about.kl is not None, penalised=about.prior is not None)


COVERED = {word for name in METHODS for word in (name, name.split()[0])}
METHODS |= {name: default_row(method) for name, method in REGISTERED.items() if name not in COVERED}


def rows(keep: Callable[[Row], bool] = lambda row: True) -> list[Any]:
    return [pytest.param(row.build, id=name) for name, row in METHODS.items() if keep(row)]


@pytest.fixture(params=rows())
def build(request: pytest.FixtureRequest) -> Build:
    """`build(network)` gives the posterior, where `network(i)` gives the i-th network."""
    return request.param


@pytest.fixture(params=rows(lambda row: row.differs))
def build_stochastic(request: pytest.FixtureRequest) -> Build:
    """Methods whose passes differ."""
    return request.param


@pytest.fixture(params=rows(lambda row: row.noisy))
def build_noisy(request: pytest.FixtureRequest) -> Build:
    """Methods whose training is random."""
    return request.param


@pytest.fixture(params=rows(lambda row: row.weights))
def build_weights(request: pytest.FixtureRequest) -> Build:
    """Methods whose draws are weights."""
    return request.param


@pytest.fixture(params=rows(lambda row: row.kl))
def build_gaussian(request: pytest.FixtureRequest) -> Build:
    """Gaussian posteriors and mixtures of them."""
    return request.param


@pytest.fixture(params=rows(lambda row: not (row.kl or row.penalised)))
def build_unpenalised(request: pytest.FixtureRequest) -> Build:
    """Methods that descend the loss alone."""
    return request.param


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(12, 4, generator=generator), torch.randint(3, (12,), generator=generator)


@pytest.fixture
def train(batch: tuple[Tensor, Tensor]) -> Callable[..., list[Any]]:
    """`train(posterior, steps)` on one batch; returns the terms."""
    x, y = batch

    def run(posterior: Posterior, steps: int, inputs: Tensor = x) -> list[Any]:
        return [posterior.step(lambda net: F.cross_entropy(net(inputs), y)) for _ in range(steps)]

    return run


@pytest.fixture
def plain() -> Network:
    """A network without running statistics."""

    def network(index: int) -> nn.Module:
        torch.manual_seed(index)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    return network


@pytest.fixture
def normed() -> Network:
    """A network with running statistics and a layer used twice."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
            self.twice, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.norm(self.first(x)).relu()
            return self.last(self.twice(self.twice(hidden).relu()))

    def network(index: int) -> nn.Module:
        torch.manual_seed(index)
        return Net()

    return network


@pytest.fixture
def same() -> Callable[[Any, Any], bool]:
    """Bit equality of nested states."""

    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor):
            return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
        return bool(a == b)

    return equal
