"""Noisy K-FAC's noise, standard deviations and KL against dense matrices."""

import math
from typing import Any

import pytest
import torch
from kfac_dense import DOUBLE, damped, dense, matrix_of, network, nll, normal
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F

from credo.core.prior import Gaussian
from credo.methods.kfac.blocks import KroneckerBlock
from credo.methods.kfac.noisy_kfac import NoisyKFAC


def trained(**options: Any) -> NoisyKFAC:
    settings = {"data_size": 20, "prior_precision": 2.0, "temperature": 0.5, "random": "*", **options}
    posterior = NoisyKFAC(network(), **settings)
    for _ in range(3):
        posterior.step(nll)
    return posterior


def covariances(posterior: NoisyKFAC) -> dict[str, list[Tensor]]:
    """τ/N · (A' ⊗ G')⁻¹ by dense algebra, for each block and group."""
    shift = 0.5 * 2.0 / 20
    found = {}
    for block in posterior.blocks:
        if isinstance(block, KroneckerBlock):
            fisher = [dense(a, g) for a, g in damped(block, 1e-2 + shift)]
        else:
            fisher = [torch.diag((block.curvature + 1e-2 + shift).flatten())]
        found[block.names[0]] = [0.5 / 20 * torch.linalg.inv(f) for f in fisher]
    return found


def test_noise_is_a_linear_map_whose_covariance_is_the_dense_inverse() -> None:
    """M Mᵀ by unit vectors: exact, so that a wrong triangle (Lᵀ L instead of L Lᵀ) cannot hide."""
    posterior = trained()
    for block in posterior.blocks:
        units = torch.eye(block.momentum.numel(), dtype=DOUBLE).view(-1, *block.momentum.shape)
        columns = torch.stack([block.correlate(unit).flatten() for unit in units], dim=1)
        parts = covariances(posterior)[block.names[0]]
        torch.testing.assert_close(0.5 / 20 * columns @ columns.T, torch.block_diag(*parts))


def test_draws_have_the_covariance_of_the_dense_kronecker_product() -> None:
    posterior = trained()
    count = 2000
    draws, means = [posterior.draw() for _ in range(count)], posterior.mean()
    exact = torch.block_diag(*(part for parts in covariances(posterior).values() for part in parts))
    rows = torch.stack(
        [torch.cat([(b.matrix(draw) - b.matrix(means)).flatten() for b in posterior.blocks]) for draw in draws]
    )
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(exact), rows.T, upper=False)
    # Over all 79 weights: entries of a Wishart matrix have std √2/√2000 = 0.032 on and 0.022 off its diagonal; that
    # one of 3 160 is 6 std off has a chance of about 10⁻⁵.
    torch.testing.assert_close(whitened @ whitened.T / count, torch.eye(len(exact), dtype=DOUBLE), rtol=0, atol=0.19)
    assert (whitened.mean(1).abs() < 6 / math.sqrt(count)).all()


def test_std_is_the_diagonal_and_the_kl_that_of_the_dense_gaussians() -> None:
    posterior = trained()
    std, kl = posterior.std(), 0.0
    assert list(std) == list(posterior.mean()) == [name for name, _ in posterior.model.named_parameters()]
    for block in posterior.blocks:
        matrix, means = block.matrix(std), block.matrix(posterior.mean())
        parts = covariances(posterior)[block.names[0]]
        for group, exact in enumerate(parts):
            pieces = [(m[group] if len(parts) > 1 else m).flatten() for m in (matrix, means)]
            torch.testing.assert_close(pieces[0], exact.diagonal().sqrt())
            prior = D.MultivariateNormal(torch.zeros_like(pieces[1]), torch.eye(len(exact), dtype=DOUBLE) / 2)
            kl += float(D.kl_divergence(D.MultivariateNormal(pieces[1], exact), prior))
    terms = posterior.step(nll)
    assert terms.kl == pytest.approx(kl, rel=1e-6)
    assert terms.penalty == pytest.approx(0.5 / 20 * kl, rel=1e-6)


def test_a_prior_that_differs_within_a_layer_enters_its_noise_by_the_mean_and_its_pull_exactly() -> None:
    def layer() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(3, 2).double()

    x, y = normal(6, 3), torch.arange(6) % 2
    by_name = NoisyKFAC(layer(), data_size=10, prior=Gaussian({"*": 0.5}, {"weight": 2.0**-0.5, "bias": 6.0**-0.5}))
    same = NoisyKFAC(layer(), data_size=10, prior=Gaussian(0.5, 3.0**-0.5))  # (6·2 + 2·6)/8
    for posterior in (by_name, same):
        posterior.step(lambda net: F.cross_entropy(net(x), y))
    for name, std in by_name.std().items():
        torch.testing.assert_close(std, same.std()[name])
    pulls = {
        name: 0.1 * delta * (getattr(layer(), name).detach() - 0.5) for name, delta in (("weight", 2), ("bias", 6))
    }
    slopes = torch.autograd.grad(F.cross_entropy((net := layer())(x), y), list(net.parameters()))
    expected = matrix_of(slopes[0] + pulls["weight"], slopes[1] + pulls["bias"])
    torch.testing.assert_close(by_name.blocks[0].momentum[0], expected)


def test_before_the_first_step_draws_are_the_mean() -> None:
    posterior = NoisyKFAC(network(), data_size=20)
    draw, mean = posterior.draw(), posterior.mean()
    assert all(torch.equal(draw[name], mean[name]) and not posterior.std()[name].any() for name in mean)


def test_a_layer_that_is_not_used_keeps_its_prior() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    posterior = NoisyKFAC(Net().double(), data_size=20, prior_precision=4.0, damping=0.0, temperature=0.3)
    posterior.step(lambda net: F.cross_entropy(net(normal(6, 4)), torch.arange(6) % 3))
    torch.testing.assert_close(posterior.std()["unused.weight"], torch.full((2, 5), 0.5, dtype=DOUBLE))
