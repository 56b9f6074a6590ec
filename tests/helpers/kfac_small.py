"""A small network in single precision for K-FAC, its data and loss, and comparisons of what became of it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, Y = normal(12, 4, seed=1), torch.arange(12) % 3


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def nll(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), Y)


def vector(posterior: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in posterior.model.parameters()])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b
