"""Laplace's curvature and evidence the slow way: dense Jacobians of single examples, and the Hessian of the loss."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from credo.core.likelihood import Likelihood


class Recurrent(nn.Module):
    """An embedding, an LSTM and a linear layer."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = (
            nn.Embedding(7, 3),
            nn.LSTM(3, 4, batch_first=True),
            nn.Linear(4, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


class Attention(nn.Module):
    """A Transformer's layer and a linear one."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def conv() -> nn.Module:
    """Grouped, depthwise and transposed convolutions, with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 2, groups=4),
        nn.ConvTranspose2d(4, 2, 2),
        nn.Flatten(),
        nn.Linear(18, 3),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def jacobian(net: nn.Module, row: Tensor, names: Sequence[str]) -> Tensor:
    """[outputs, weights] of one example."""
    parameters = [net.get_parameter(name) for name in names]
    rows = []
    for entry in net(row[None]).flatten():
        found = torch.autograd.grad(entry, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([gradient.flatten() for gradient in found]))
    return torch.stack(rows)


def output_hessian(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """[outputs, outputs]: the Hessian of one example's NLL by its outputs, which is Λ for classes and fixed noise."""
    size = outputs.numel()
    flat = outputs.detach().flatten()
    hessian = torch.autograd.functional.hessian(lambda f: likelihood.nll(f.view_as(outputs), y), flat)
    return hessian.reshape(size, size)


def dense_ggn(net: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor, names: Sequence[str]) -> Tensor:
    """Σ JᵀΛJ over the examples."""
    net.eval()
    total: Tensor = torch.zeros((), dtype=torch.double)
    for row, target in zip(x, y, strict=True):
        own = jacobian(net, row, names)
        total = total + own.T @ output_hessian(likelihood, net(row[None]), target[None]) @ own
    return total


def dense_evidence(
    net: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor, names: Sequence[str], h: Tensor, precision: Tensor
) -> float:
    """log p(D|θ*) − ½(log|P| − log|P₀| + θ*ᵀP₀θ*)."""
    weights = torch.cat([net.get_parameter(name).detach().flatten() for name in names]).double()
    whole = h.double() + precision.diag()
    log_likelihood = -len(x) * likelihood.nll(net(x), y).item()
    scatter = float((weights.square() * precision).sum())
    return log_likelihood - 0.5 * (float(torch.logdet(whole) - precision.log().sum()) + scatter)
