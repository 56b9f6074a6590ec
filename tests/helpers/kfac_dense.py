"""K-FAC's matrices as dense ones, and a small network in double precision to make them of."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.methods.kfac.blocks import KroneckerBlock

DOUBLE = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    conv = nn.Conv2d(2, 4, 2, groups=2)
    return nn.Sequential(conv, nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()


X = normal(8, 2, 3, 3, seed=1) + 2 * normal(8, 1, 1, 1, seed=2)  # pixels that go together
Y = torch.arange(8) % 3


def nll(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), Y)


def dense(a: Tensor, g: Tensor) -> Tensor:
    """The Fisher matrix over (weight, bias) row by row, as `matrix.flatten()` has them."""
    return torch.kron(g, a)


def matrix_of(weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat([weight.detach().flatten(1), bias.detach().unsqueeze(1)], dim=1)


def factored_damping(inputs: Tensor, outputs: Tensor, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    """π√γ and √γ/π of each group, π² being the mean eigenvalue of A over that of G."""
    ratio = (torch.linalg.eigvalsh(inputs).mean(-1) / torch.linalg.eigvalsh(outputs).mean(-1)).sqrt()
    root = torch.as_tensor(damping, dtype=ratio.dtype).sqrt()
    return root * ratio, root / ratio


def damped(block: KroneckerBlock, damping: float) -> list[tuple[Tensor, Tensor]]:
    """A' and G' of every group."""
    shares = factored_damping(block.inputs, block.outputs, damping)
    return [
        (a + for_a * torch.eye(len(a), dtype=DOUBLE), g + for_g * torch.eye(len(g), dtype=DOUBLE))
        for a, g, for_a, for_g in zip(block.inputs, block.outputs, *shares, strict=True)
    ]
