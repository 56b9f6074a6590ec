"""Posteriors whose linearised predictions are computed the slow way: from dense Jacobians of single examples."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import credo
from credo.core.posterior import Posterior


class DenseLinear(credo.BBB):
    """An independent Gaussian that has moments of function values, and says what they were asked for."""

    default_predictive = "linear"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[bool] = []

    def function_moments(self, x: Tensor, *, diagonal: bool = False) -> tuple[Tensor, Tensor]:
        self.asked.append(diagonal)
        f, covariance = dense_moments(self, x)
        return f, covariance.diagonal(dim1=1, dim2=2) if diagonal else covariance


def dense_jacobian(posterior: credo.GaussianPosterior, x: Tensor) -> Tensor:
    """[batch, outputs, weights], of the random weights in the order of `std()`."""
    own = dict(posterior.model.named_parameters())
    weights = {name: own[name].detach() for name in posterior.std()}

    def outputs(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(posterior.model, weights, (row.unsqueeze(0),)).flatten()

    found = vmap(jacrev(outputs), in_dims=(None, 0))(weights, x)
    return torch.cat([each.flatten(2) for each in found.values()], -1)


def dense_moments(posterior: credo.GaussianPosterior, x: Tensor) -> tuple[Tensor, Tensor]:
    """f(μ) [batch, outputs], and J diag(noise_scale²·σ²) Jᵀ [batch, outputs, outputs]."""
    own = dense_jacobian(posterior, x)
    variance = torch.cat([std.flatten() for std in posterior.std().values()]).square() * posterior.noise_scale**2
    with torch.no_grad():
        return posterior.model(x).reshape(len(x), -1), (own * variance) @ own.mT


def network(outputs: int = 3, *, seed: int = 0, inputs: int = 4) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def rows(count: int, *, inputs: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def dense_linear(outputs: int = 3, *, std: float = 0.3, seed: int = 0, **options: Any) -> DenseLinear:
    posterior = DenseLinear(network(outputs, seed=seed), data_size=10, init=std, seed=seed, **options)
    posterior.eval()
    return posterior


def ensemble(outputs: int = 3, **options: Any) -> Posterior:
    return credo.Ensemble([dense_linear(outputs, seed=seed, **options) for seed in range(2)])
