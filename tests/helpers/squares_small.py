"""A small network with the usual layers for passes that take squares, its batch and loss."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1, bias=False),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4 * 25, 3),
    )


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 2, 5, 5, generator=generator, dtype=dtype), torch.randint(3, (6,), generator=generator)


X, Y = batch()


def nll(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), Y)
