"""EKFAC's curvature, steps, noise and KL against dense matrices."""

import math
from typing import Any

import pytest
import torch
from kfac_dense import DOUBLE, X, Y, network, nll
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F

import credo
from credo.core.errors import UnsupportedModelError
from credo.methods.kfac.eigen_block import EigenBlock
from credo.methods.kfac.kfac import KFAC
from credo.methods.kfac.noisy_kfac import NoisyKFAC

SHIFT = 0.5 * 2.0 / 20
EKFAC = {"eigenbasis": True}


def trained(steps: int = 3, method: Any = NoisyKFAC, **options: Any) -> Any:
    settings = {"data_size": 20, "prior_precision": 2.0, "temperature": 0.5, "random": "*", "curvature": EKFAC}
    posterior = method(network(), **{**settings, **options})
    for _ in range(steps):
        posterior.step(nll)
    return posterior


def layers(posterior: Any) -> list[EigenBlock]:
    return [block for block in posterior.blocks if isinstance(block, EigenBlock)]


def whole_basis(block: EigenBlock, group: int) -> Tensor:
    return torch.kron(block.output_basis[group], block.input_basis[group])


def curvature(block: EigenBlock, group: int, damping: float) -> Tensor:
    """The dense matrix that eigenvectors and variances stand for."""
    whole = whole_basis(block, group)
    return whole @ torch.diag(block.variances[group].flatten() + damping) @ whole.T


def fisher(model: nn.Module, block: EigenBlock) -> list[Tensor]:
    """E[∇ ∇ᵀ] over the examples, of each group, row by row as `matrix.flatten()` has it."""
    found = []
    for row in range(len(X)):
        loss = F.cross_entropy(model(X[row : row + 1]), Y[row : row + 1])
        slopes = torch.autograd.grad(loss, [model.get_parameter(name) for name in block.names])
        found.append(block.matrix(dict(zip(block.names, slopes, strict=True))).flatten(1))
    each = torch.stack(found)
    return [g.T @ g / len(X) for g in each.unbind(1)]


def test_the_first_curvature_is_that_of_kfac() -> None:
    posterior = trained(1)
    for block in layers(posterior):
        for group, (a, g) in enumerate(zip(block.inputs, block.outputs, strict=True)):
            torch.testing.assert_close(curvature(block, group, 0.0), torch.kron(g, a))


def test_variances_are_the_fisher_matrix_along_the_eigenvectors_averaged() -> None:
    posterior = trained(1, KFAC, lr=0.05)
    before = {block: (block.basis, block.variances.clone()) for block in layers(posterior)}
    before = {b: (tuple(u.clone() for u in basis), s) for b, (basis, s) in before.items()}
    exact = {block: fisher(posterior.model, block) for block in layers(posterior)}
    posterior.step(nll)
    for block, ((u, v), variances) in before.items():
        for group, matrix in enumerate(exact[block]):
            old, new = torch.kron(v[group], u[group]), whole_basis(block, group)
            found = ((old.T @ matrix @ old).diagonal() + variances[group].flatten()) / 2
            carried = (new.T @ old @ torch.diag(found) @ old.T @ new).diagonal()
            torch.testing.assert_close(block.variances[group].flatten(), carried)


def test_between_new_eigenvectors_variances_are_new_in_every_step() -> None:
    posterior = trained(4, KFAC, lr=0.05, curvature={**EKFAC, "inverse_every": 3, "decay": 0.6})
    block = layers(posterior)[0]
    basis, variances = [u.clone() for u in block.basis], block.variances.clone()
    exact = fisher(posterior.model, block)
    posterior.step(nll)
    assert all(torch.equal(now, old) for now, old in zip(block.basis, basis, strict=True))
    for group, matrix in enumerate(exact):
        whole = whole_basis(block, group)
        new = (whole.T @ matrix @ whole).diagonal().view_as(variances[group])
        torch.testing.assert_close(block.variances[group], 0.6 * variances[group] + 0.4 * new)


def test_a_step_is_that_of_the_dense_inverse() -> None:
    posterior = trained(3, KFAC, lr=0.1, clip=None, momentum=0.0)
    before = {name: p.detach().clone() for name, p in posterior.model.named_parameters()}
    slopes = dict(zip(before, torch.autograd.grad(nll(posterior.model), [*posterior.model.parameters()]), strict=True))
    posterior.step(nll)
    after = dict(posterior.model.named_parameters())
    for block in layers(posterior):
        old, new, slope = (block.matrix(tensors) for tensors in (before, after, slopes))
        for group in range(block.groups):
            pulled = (slope[group] + SHIFT * old[group]).flatten()
            direction = torch.linalg.solve(curvature(block, group, 1e-3 + SHIFT), pulled)
            torch.testing.assert_close(new[group].flatten(), old[group].flatten() - 0.1 * direction)


def test_noise_std_and_kl_are_those_of_the_dense_inverse() -> None:
    posterior = trained()
    std, mean, kl = posterior.std(), posterior.mean(), 0.0
    for block in posterior.blocks:
        units = torch.eye(block.momentum.numel(), dtype=DOUBLE).view(-1, *block.momentum.shape)
        columns = torch.stack([block.correlate(unit).flatten() for unit in units], dim=1)
        if isinstance(block, EigenBlock):
            dense = [torch.linalg.inv(curvature(block, group, 1e-2 + SHIFT)) for group in range(block.groups)]
            exact = 0.5 / 20 * torch.block_diag(*dense)
        else:
            exact = 0.5 / 20 * torch.diag(1 / (block.curvature + 1e-2 + SHIFT))
        torch.testing.assert_close(0.5 / 20 * columns @ columns.T, exact)
        torch.testing.assert_close(block.matrix(std).flatten(), exact.diagonal().sqrt())
        prior = D.MultivariateNormal(torch.zeros(len(exact), dtype=DOUBLE), torch.eye(len(exact), dtype=DOUBLE) / 2)
        kl += float(D.kl_divergence(D.MultivariateNormal(block.matrix(mean).flatten(), exact), prior))
    assert posterior.step(nll).kl == pytest.approx(kl, rel=1e-6)


def test_one_linear_layer_of_one_example_at_a_time_has_the_exact_fisher_matrix() -> None:
    """Inputs along the axes: the Fisher matrix of drawn labels is diagonal in the basis, and EKFAC is exact.

    K-FAC is not: its factors leave out that outputs are surer for some inputs than for others.
    """
    torch.manual_seed(0)
    layer = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, 2.0, 4.0]]))
    x, y = torch.eye(3, dtype=DOUBLE) * torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[1.0], [0.0], [1.0]], dtype=DOUBLE)
    slopes = (layer(x).detach().sigmoid() - y) * x
    exact = slopes.T @ slopes / 3
    found = {}
    for name, options in (("kfac", {}), ("ekfac", EKFAC)):
        posterior = KFAC(layer, data_size=3, lr=0.0, likelihood="bernoulli", curvature={"decay": 0.0, **options})
        for _ in range(3):
            posterior.step(lambda net: F.binary_cross_entropy_with_logits(net(x), y))
        (block,) = posterior.blocks
        ours = isinstance(block, EigenBlock)
        found[name] = curvature(block, 0, 0.0) if ours else torch.kron(block.outputs[0], block.inputs[0])
    torch.testing.assert_close(found["ekfac"], exact)
    assert (found["kfac"] - exact).norm() > 0.3 * exact.norm()


def test_weights_of_rows_are_rows_repeated() -> None:
    """Where weights stay: else it depends on the choice among eigenvectors of the eigenvalue 0."""
    weights = torch.tensor([1.0, 0, 2, 1, 3, 0, 1, 1], dtype=DOUBLE)
    rows = torch.repeat_interleave(torch.arange(8), weights.long())
    weighted, repeated = (trained(0, KFAC, lr=0.0) for _ in range(2))
    for _ in range(3):
        each = lambda net: (weights * F.cross_entropy(net(X), Y, reduction="none")).sum() / weights.sum()  # noqa: E731
        weighted.step(each, weights=weights)
        repeated.step(lambda net: F.cross_entropy(net(X[rows]), Y[rows]))
    for one, other in zip(layers(weighted), layers(repeated), strict=True):
        torch.testing.assert_close(one.variances.sum(), other.variances.sum())
        torch.testing.assert_close(curvature(one, 0, 0.0), curvature(other, 0, 0.0))


def test_halves_of_a_batch_gathered_are_one_step_on_the_batch() -> None:
    whole, halves = trained(1, KFAC), trained(1, KFAC)
    whole.step(nll)
    for rows in (slice(0, 4), slice(4, 8)):
        halves.gather(lambda net, rows=rows: F.cross_entropy(net(X[rows]), Y[rows]))
    halves.update()
    for one, other in zip(layers(whole), layers(halves), strict=True):
        torch.testing.assert_close(curvature(one, 0, 0.0), curvature(other, 0, 0.0))


def test_drawn_labels_give_variances_of_their_own() -> None:
    data, drawn = (
        trained(3, KFAC, lr=0.0, curvature={**EKFAC, "fisher": fisher}) for fisher in ("empirical", "sampled")
    )
    for one, other in zip(layers(data), layers(drawn), strict=True):
        assert not torch.allclose(one.variances, other.variances)
        assert 0.1 < float(one.variances.sum() / other.variances.sum()) < 10


def test_a_prior_that_differs_within_a_layer_enters_its_noise_by_the_mean() -> None:
    scale = {"*weight": 2.0**-0.5, "*": 6.0**-0.5}
    posterior = trained(prior_precision=None, prior=credo.priors.Gaussian(0.0, scale))
    block = layers(posterior)[-1]  # 16 inputs and a bias for each output
    shift = 0.5 / 20 * (16 * 2 + 6) / 17
    torch.testing.assert_close(block.root, (block.variances + 1e-2 + shift).rsqrt())


def test_a_layer_that_is_not_used_keeps_its_prior() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    options: dict[str, Any] = {"prior_precision": 4.0, "damping": 0.0, "temperature": 0.3, "curvature": EKFAC}
    posterior = NoisyKFAC(Net().double(), data_size=20, **options)
    for _ in range(3):
        posterior.step(lambda net: F.cross_entropy(net(X.flatten(1)[:, :4]), Y))
    torch.testing.assert_close(posterior.std()["unused.weight"], torch.full((2, 5), 0.5, dtype=DOUBLE))


def test_an_input_that_does_not_begin_with_the_batch_is_refused_by_name() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(2, 3), nn.Linear(27, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x.reshape(-1, 2)).reshape(len(x), -1))

    posterior = KFAC(Folded().double(), data_size=8, curvature=EKFAC)
    posterior.step(nll)  # the first eigenvectors
    with pytest.raises(UnsupportedModelError, match=r"inner gets an input .* curvature=\{'diagonal': \['inner.weight'"):
        posterior.step(nll)
    posterior = KFAC(Folded().double(), data_size=8, curvature={**EKFAC, "diagonal": ["inner.*"]})
    for _ in range(2):
        assert math.isfinite(posterior.step(nll).loss)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_the_option_is_true_or_false(value: Any) -> None:
    with pytest.raises(ValueError, match=r"curvature\.eigenbasis"):
        KFAC(network(), data_size=8, curvature={"eigenbasis": value})
