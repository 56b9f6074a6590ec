"""Laplace's curvature, covariance and evidence against dense autograd."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from laplace_dense import Attention, Recurrent, conv, dense_evidence, dense_ggn, jacobian, mlp
from torch import Tensor, nn

import credo
from credo.core.likelihood import Bernoulli, Categorical, GaussianNoise, Likelihood

SIZE = 6
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(SIZE, 4)),
    "conv": (conv, lambda: torch.randn(SIZE, 2, 6, 6)),
    "recurrent": (Recurrent, lambda: torch.randint(7, (SIZE, 5))),
    "attention": (Attention, lambda: torch.randn(SIZE, 3, 4)),
}


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    build, inputs = NETWORKS[name]
    net, x = build().double(), inputs()
    x = x.double() if x.is_floating_point() else x
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return net, x, torch.arange(SIZE) % 3


def fitted(net: nn.Module, x: Tensor, y: Tensor, batch: int = SIZE, **options: Any) -> credo.Laplace:
    options = {"data_size": len(x), "prior_precision": 0.7, "random": "all", **options}
    return credo.Laplace(net, **options).fit(list(zip(x.split(batch), y.split(batch), strict=True)))


def covariance(posterior: credo.Laplace) -> Tensor:
    """P⁻¹ from what it does to the identity as a Jacobian."""
    layout = posterior.layout
    eye = torch.eye(layout.size, dtype=torch.double)
    pieces = eye.split(layout.sizes, dim=1)
    jacobians = {n: p.view(1, -1, *layout.shapes[n]) for n, p in zip(layout.names, pieces, strict=True)}
    return posterior.structure.covariance(jacobians)[0]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("structure", ["full", "diag", "low-rank"])
def test_curvature_covariance_and_evidence_are_those_of_the_dense_matrix(name: str, structure: str) -> None:
    net, x, y = made(name)
    posterior = fitted(net, x, y, structure=structure, rank=1000)
    names = posterior.layout.names
    h = dense_ggn(net, Categorical(), x, y, names)
    h = h.diag().diag() if structure == "diag" else h
    precision = torch.full((len(h),), 0.7, dtype=torch.double)
    wanted = torch.linalg.inv(h + precision.diag())
    torch.testing.assert_close(covariance(posterior), wanted)
    variance = torch.cat([std.flatten() for std in posterior.std().values()]).square()
    torch.testing.assert_close(variance, wanted.diag())
    evidence = dense_evidence(net, Categorical(), x, y, names, h, precision)
    assert posterior.log_marginal_likelihood() == pytest.approx(evidence, rel=1e-9)


def test_few_eigenpairs_leave_the_diagonal_exact() -> None:
    net, x, y = made("mlp")
    posterior = fitted(net, x, y, structure="low-rank", rank=3)
    structure: Any = posterior.structure
    h = dense_ggn(net, Categorical(), x, y, posterior.layout.names)
    torch.testing.assert_close(structure.columns.square().sum(1) + structure.rest, h.diag())
    values, vectors = torch.linalg.eigh(h)
    largest = (vectors[:, -3:] * values[-3:]) @ vectors[:, -3:].T
    torch.testing.assert_close(structure.columns @ structure.columns.T, largest)
    whole = largest + structure.rest.diag() + 0.7 * torch.eye(len(h), dtype=torch.double)
    torch.testing.assert_close(covariance(posterior), torch.linalg.inv(whole))


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "low-rank"])
@pytest.mark.parametrize("random", ["last", "all"])
def test_function_moments_are_those_of_the_linearised_network(structure: str, random: str) -> None:
    net, x, y = made("conv")
    posterior = fitted(net, x, y, structure=structure, random=random, rank=9)
    outputs, found = posterior.function_moments(x)
    assert torch.equal(outputs, net.eval()(x))
    dense = covariance(posterior)
    for row, own in zip(x, found, strict=True):
        j = jacobian(net, row, posterior.layout.names)
        torch.testing.assert_close(own, j @ dense @ j.T)
    _, variances = posterior.function_moments(x, diagonal=True)
    torch.testing.assert_close(variances, found.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "low-rank"])
def test_the_last_layer_in_closed_form_is_that_of_backward_passes(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x, y = made("mlp")
    closed = fitted(net, x, y, structure=structure, random="last", rank=7)
    moments = closed.function_moments(x)
    monkeypatch.setattr("credo.methods.laplace.last_layer.LastLayer.features", lambda *_: None)
    general = fitted(net, x, y, structure=structure, random="last", rank=7)
    torch.testing.assert_close(covariance(closed), covariance(general))
    torch.testing.assert_close(moments, general.function_moments(x))
    assert closed.log_marginal_likelihood() == pytest.approx(general.log_marginal_likelihood())


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "low-rank"])
def test_draws_have_the_covariance(structure: str) -> None:
    net, x, y = made("mlp")
    posterior = fitted(net, x, y, structure=structure, random="last", rank=7)
    draws = torch.stack([torch.cat([w.flatten() for w in posterior.draw().values()]) for _ in range(1500)])
    mean = torch.cat([w.flatten() for w in posterior.mean().values()])
    wanted = covariance(posterior)
    # Entries of a sample covariance have a standard deviation of √((Σᵢⱼ² + ΣᵢᵢΣⱼⱼ)/n); five of them for 18² entries.
    error = ((wanted.square() + torch.outer(wanted.diag(), wanted.diag())) / len(draws)).sqrt()
    assert bool(((draws - mean).T @ (draws - mean) / len(draws) - wanted).abs().lt(5 * error).all())


LIKELIHOODS: dict[str, tuple[Likelihood, int, Tensor]] = {
    "categorical": (Categorical(), 3, torch.arange(SIZE) % 3),
    "bernoulli": (Bernoulli(), 1, torch.arange(SIZE) % 2),
    "gaussian": (GaussianNoise(0.3), 2, torch.randn(SIZE, 2, dtype=torch.double)),
    "a noise for each output": (GaussianNoise([0.3, 1.5]), 2, torch.randn(SIZE, 2, dtype=torch.double)),
}


@pytest.mark.parametrize("random", ["last", "all"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_every_likelihood(name: str, random: str) -> None:
    likelihood, outputs, y = LIKELIHOODS[name]
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double(), torch.randn(SIZE, 3).double()
    posterior = fitted(net, x, y, structure="full", random=random, likelihood=likelihood)
    h = dense_ggn(net, posterior.likelihood, x, y, posterior.layout.names)
    torch.testing.assert_close(posterior.structure.curvature, h)


def test_predicted_noise_has_the_expected_curvature() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(3, 2).double(), torch.randn(SIZE, 3).double()
    likelihood = GaussianNoise(heteroscedastic=True)
    posterior = fitted(net, x, net(x)[:, :1].detach(), structure="full", likelihood=likelihood)
    factors = likelihood.curvature_factors(net(x)).detach()
    rows = [torch.outer(v, torch.cat([row, row.new_ones(1)])) for k in factors for v, row in zip(k, x, strict=True)]
    flat = torch.stack([torch.cat([m[:, :-1].flatten(), m[:, -1]]) for m in rows])
    torch.testing.assert_close(posterior.structure.curvature, flat.T @ flat)


def test_positions_of_one_example_count_as_its_mean_loss_has_them() -> None:
    """A network with an output for each position: the loss is a mean over positions, and so is its curvature."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(4, 2, 3).double()
    y = torch.arange(8).view(4, 2) % 3
    for structure in ("full", "diag"):
        posterior = fitted(net, x, y, structure=structure)
        h = dense_ggn(net, Categorical(), x, y, posterior.layout.names)
        found = posterior.structure.curvature
        torch.testing.assert_close(found, h if structure == "full" else h.diag())


def test_labels_that_are_ignored_do_not_count() -> None:
    net, x, y = made("mlp")
    y[2] = -100
    counts = y != -100
    for structure, random in itertools.product(("full", "diag", "kron", "low-rank"), ("all", "last")):
        options = {"structure": structure, "random": random, "rank": 100, "data_size": 5}
        found, wanted = fitted(net, x, y, **options), fitted(net, x[counts], y[counts], **options)
        assert found.totals[0] == 5
        torch.testing.assert_close(covariance(found), covariance(wanted))
        assert found.log_marginal_likelihood() == pytest.approx(wanted.log_marginal_likelihood())


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "low-rank"])
def test_batches_and_chunks_change_nothing(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = made("conv")
    whole = fitted(net, x, y, structure=structure, rank=200)
    moments = whole.function_moments(x)
    for module in ("methods.laplace.sources", "methods.laplace.jacobians"):
        monkeypatch.setattr(f"credo.{module}.CHUNK_BYTES", 1)
    parts = fitted(net, x, y, batch=4, structure=structure, rank=200)
    torch.testing.assert_close(covariance(whole), covariance(parts))
    torch.testing.assert_close(moments, parts.function_moments(x))
