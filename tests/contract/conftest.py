"""What every method is put through: builders for all of them, a batch, and one comparison of states."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.posterior import Posterior
from credo.core.prior import ScaleMixture
from credo.methods import BBB, IVON, KFAC, MAP, OGN, VOGN, Ensemble, MCDropout, NoisyKFAC

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


SGD = {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}
METHODS: dict[str, Build] = {
    "map": of(MAP, lr=0.05, prior=1.0),
    "mc-dropout own": with_own_dropout,
    "mc-dropout rate": of(MCDropout, lr=0.05, rate=0.3),
    "ensemble of map": ensemble_of(MAP, lr=0.05),
    "ensemble of bbb": ensemble_of(BBB, lr=0.05, std_init=0.1),
    "bbb weights": of(BBB, lr=0.05, std_init=0.1, draws=2),
    "bbb lrt": of(BBB, lr=0.05, std_init=0.1, noise="lrt"),
    "bbb flipout": of(BBB, lr=0.05, std_init=0.1, noise="flipout", draws=2, **SGD),
    "vogn": of(VOGN, lr=0.05, draws=2, curvature_init=0.5, prior_precision=2.0),
    "vogn first at mean": of(VOGN, lr=0.05, averaged=True, prior_precision={"*weight": 2.0, "*": 1.0}),
    "ogn": of(OGN, lr=0.05),
    "ivon": of(IVON, lr=0.3, draws=2, curvature_decay=0.9),
    "ivon squares": of(IVON, lr={"*bias": 0.05, "*": 0.1}, estimator="squares", random="all", clip=0.5),
    "kfac": of(KFAC, lr=0.05, inverse_every=2),
    "noisy-kfac": of(NoisyKFAC, lr=0.05, draws=2, inverse_every=2, prior_precision={"*weight": 2.0, "*": 1.0}),
    "noisy-kfac sampled": of(NoisyKFAC, lr={"*bias": 0.02, "*": 0.05}, fisher="sampled", factor_every=2),
    "ensemble of vogn": ensemble_of(VOGN, lr=0.05, curvature_init=0.5),
    "bbb scale mixture": of(BBB, lr=0.05, std_init=0.1, prior=ScaleMixture(), noise="lrt"),
}


POINT = ("map", "ogn", "kfac")
FIRST_AT_MEAN = ("vogn first at mean", "noisy-kfac", "noisy-kfac sampled")
GAUSSIAN = [name for name in METHODS if any(kind in name for kind in ("bbb", "vogn", "ivon"))]


@pytest.fixture(params=METHODS)
def build(request: pytest.FixtureRequest) -> Build:
    """`build(network)` gives the posterior, where `network(i)` gives the i-th network."""
    return METHODS[request.param]


@pytest.fixture(params=[name for name in METHODS if name not in (*POINT, *FIRST_AT_MEAN)])
def build_stochastic(request: pytest.FixtureRequest) -> Build:
    """Methods whose passes differ."""
    return METHODS[request.param]


@pytest.fixture(params=[name for name in METHODS if name not in (*POINT, "ensemble of map")])
def build_noisy(request: pytest.FixtureRequest) -> Build:
    """Methods whose training is random."""
    return METHODS[request.param]


@pytest.fixture(params=[name for name in METHODS if "dropout" not in name])
def build_weights(request: pytest.FixtureRequest) -> Build:
    """Methods whose draws are weights."""
    return METHODS[request.param]


@pytest.fixture(params=GAUSSIAN)
def build_gaussian(request: pytest.FixtureRequest) -> Build:
    """Gaussian posteriors and mixtures of them."""
    return METHODS[request.param]


@pytest.fixture(params=[name for name in METHODS if name not in GAUSSIAN])
def build_point(request: pytest.FixtureRequest) -> Build:
    """Methods without a KL."""
    return METHODS[request.param]


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
