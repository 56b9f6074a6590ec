"""Small trained posteriors of every kind that can be pruned."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.models import build_model

X = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(4, (40,), generator=torch.Generator().manual_seed(1))

Make = Callable[[nn.Module], Any]
KINDS: dict[str, Make] = {
    "map": lambda net: credo.MAP(net, data_size=40, lr=1e-2, prior=1.0),
    "map sgd": lambda net: credo.MAP(
        net, data_size=40, optimizer={"name": "sgd", "momentum": 0.9, "weight_decay": 0.01}, lr=0.1
    ),
    "bbb": lambda net: credo.BBB(net, data_size=40, lr=1e-2, init={"rho": (-3.0, 0.5)}),
    "bbb lrt": lambda net: credo.BBB(net, data_size=40, lr=1e-2, noise="lrt", optimizer={"clip_norm": 1.0}),
    "bbb mixture": lambda net: credo.BBB(
        net, data_size=40, lr=1e-2, prior=credo.priors.ScaleMixture(), init={"rho": (-3.0, 0.5)}
    ),
    "bbb by name": lambda net: credo.BBB(
        net,
        data_size=40,
        lr=1e-2,
        prior=credo.priors.Gaussian(0.1, {"*bias": 2.0, "*": 0.5}),
        init={"rho": (-3.0, 0.5)},
    ),
    "vogn": lambda net: credo.VOGN(net, data_size=40, lr=1e-2, damping=0.1),
    "vogn by name": lambda net: credo.VOGN(
        net,
        data_size=40,
        lr={"conv*": 1e-2, "*": 2e-2},
        prior_precision={"*bias": 1.0, "*": 4.0},
        curvature={"init": 0.1},
    ),
    "ivon": lambda net: credo.IVON(net, data_size=40, lr=0.05, curvature=0.9),
}


def nll(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), Y)


def network(seed: int = 0) -> nn.Module:
    return build_model(
        "convnet", inputs=(1, 8, 8), classes=4, channels=(6, 8), hidden=(12,), batch_norm=True, seed=seed
    )


def trained(make: Make, net: nn.Module | None = None, steps: int = 3) -> Any:
    posterior = make(network() if net is None else net)
    for _ in range(steps):
        posterior.step(nll)
    return posterior


def criterion(posterior: credo.Posterior) -> str:
    return "snr" if isinstance(posterior, credo.GaussianPosterior) else "magnitude"


def weights_of(posterior: credo.Posterior) -> list[dict[str, Tensor]]:
    """Complete sets of weights: of the mean and of three draws."""
    mean = {name: p.detach().clone() for name, p in posterior.model.named_parameters()}
    with torch.no_grad():
        return [mean, *({**mean, **posterior.draw()} for _ in range(3))]


@pytest.fixture
def kit() -> SimpleNamespace:
    """All of the above."""
    return SimpleNamespace(
        X=X, Y=Y, KINDS=KINDS, nll=nll, network=network, trained=trained, criterion=criterion, weights_of=weights_of
    )


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Every kind of posterior, by name."""
    name: str = request.param
    return name
