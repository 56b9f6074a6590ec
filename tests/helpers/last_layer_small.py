"""A small network with a last layer, data for it, and its posterior as matrices."""

from typing import Any

import torch
from torch import Tensor, nn

import credo

ROWS, OUTPUTS = 40, 3
STDS = [0.3, 1.0, 2.0]


def network(outputs: int = OUTPUTS, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs, bias=bias)).double()


def made(likelihood: Any, outputs: int = OUTPUTS, *, bias: bool = True, **options: Any) -> credo.LastLayer:
    return credo.LastLayer(network(outputs, bias=bias), data_size=ROWS, likelihood=likelihood, **options)


def inputs(rows: int = ROWS, seed: int = 1) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def regression(outputs: int = OUTPUTS) -> tuple[Tensor, Tensor]:
    generator, x = torch.Generator().manual_seed(2), inputs()
    weights = torch.randn(4, outputs, generator=generator, dtype=torch.double)
    noise = torch.randn(ROWS, outputs, generator=generator, dtype=torch.double) * torch.tensor(STDS[:outputs])
    return x, (x @ weights).tanh() + 0.5 + noise


def classes(count: int = OUTPUTS) -> tuple[Tensor, Tensor]:
    generator, x = torch.Generator().manual_seed(2), inputs()
    weights = torch.randn(4, count, generator=generator, dtype=torch.double)
    return x, (x @ weights + torch.randn(ROWS, count, generator=generator, dtype=torch.double)).argmax(1)


def batches(x: Tensor, y: Tensor, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def features(net: nn.Module, x: Tensor) -> Tensor:
    """Inputs of the last layer, with a 1 for its bias."""
    assert isinstance(net, nn.Sequential)
    phi = net[:-1](x).detach()
    return phi if net[-1].bias is None else torch.cat([phi, torch.ones(len(x), 1, dtype=phi.dtype)], 1)


def matrix(weights: dict[str, Tensor]) -> Tensor:
    """Weight and bias as [outputs, features]."""
    return torch.cat([value.reshape(len(value), -1) for value in weights.values()], 1)
