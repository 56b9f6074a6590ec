"""The optimisers in a setting each or two, a network and batches for them, and a loop as others write it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo import optim

SETTINGS: dict[str, tuple[type, dict[str, Any]]] = {
    "vogn": (optim.VOGN, {"lr": 0.05, "curvature": {"init": 0.5}}),
    "vogn draws": (optim.VOGN, {"lr": 0.05, "draws": 2, "prior_precision": {"*": 2.0}}),
    "ogn": (optim.OGN, {"lr": 0.05}),
    "kfac": (optim.KFAC, {"lr": 0.05, "curvature": {"inverse_every": 2}}),
    "noisy kfac": (optim.NoisyKFAC, {"lr": 0.05, "curvature": {"factor_every": 2, "inverse_every": 3}}),
    "noisy kfac draws": (optim.NoisyKFAC, {"lr": 0.05, "draws": 2, "curvature": {"fisher": "sampled"}}),
    "ivon": (optim.IVON, {"lr": 0.3, "curvature": 0.9}),
    "ivon draws": (optim.IVON, {"lr": 0.3, "curvature": 0.9, "draws": 2}),
}
Make = Callable[..., Any]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(12, 4, generator=generator), torch.randint(3, (12,), generator=generator)) for _ in range(count)
    ]


def run(optimizer: Any, data: list[tuple[Tensor, Tensor]], scheduler: Any = None) -> list[credo.Terms]:
    terms = []
    for x, y in data:
        optimizer.step(lambda x=x, y=y: F.cross_entropy(optimizer.posterior.model(x), y))
        terms.append(optimizer.terms)
        if scheduler is not None:
            scheduler.step()
    return terms


def tensors(optimizer: Any) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in optimizer.posterior.state_dict().items() if isinstance(value, Tensor)}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert value.dtype == b[key].dtype, key
        assert torch.equal(value, b[key]), key
