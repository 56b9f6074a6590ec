"""Small networks for Adversarial Sampling, and a loss that remembers where it was asked."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N = 40


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))


def with_batchnorm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def data(size: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, generator=generator), torch.randint(4, (size,), generator=generator)


class Recorded:
    """A loss that remembers the weights it was asked at."""

    def __init__(self) -> None:
        self.x, self.y = data()
        self.seen: list[dict[str, Tensor]] = []
        self.values: list[float] = []

    def __call__(self, net: nn.Module) -> Tensor:
        value = F.cross_entropy(net(self.x), self.y)
        self.seen.append({name: p.detach().clone() for name, p in net.named_parameters()})
        self.values.append(value.item())
        return value


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors.values()])
