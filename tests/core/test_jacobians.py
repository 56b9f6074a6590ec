"""Jacobians of single examples, against one backward pass of the whole network for each output."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from credo.core.likelihood import Bernoulli, Categorical, GaussianNoise, Likelihood
from credo.methods.laplace.jacobians import jacobian_chunks, jacobians, projected_jacobians


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Branching(nn.Module):
    """Decides by its input's value, which `vmap` cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([(self.a if float(row.sum()) > 0 else self.b)(row[None]) for row in x])


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (5, 3)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.ConvTranspose2d(4, 2, 2),
            nn.Flatten(),
            nn.Linear(32, 3),
        ),
        (4, 2, 6, 6),
    ),
    "lstm": (Recurrent, (3, 5, 3)),
    "attention": (Attention, (3, 5, 4)),
    "branching": (Branching, (6, 3)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_they_are_those_of_a_loop_over_examples_and_outputs(name: str) -> None:
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    net, x = build().double().eval(), torch.randn(shape, dtype=torch.double)
    parameters = dict(net.named_parameters())
    values, found = jacobians(net, x, parameters)
    assert torch.allclose(values, net(x))
    for index, row in enumerate(x):
        for output, entry in enumerate(net(row[None])[0]):
            wanted = torch.autograd.grad(
                entry, list(parameters.values()), retain_graph=True, materialize_grads=True, allow_unused=True
            )
            for key, gradient in zip(parameters, wanted, strict=True):
                assert torch.allclose(found[key][index, output], gradient), key


@pytest.mark.parametrize("name", NETWORKS)
def test_their_products_with_vectors_are_those_of_whole_jacobians(name: str) -> None:
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    net, x = build().double().eval(), torch.randn(shape, dtype=torch.double)
    parameters = dict(net.named_parameters())
    values, whole = jacobians(net, x, parameters)
    vectors = torch.randn(len(x), 4, values.shape[1], dtype=torch.double)
    for key, found in projected_jacobians(net, x, parameters, vectors).items():
        assert torch.allclose(found, torch.einsum("bvo,bo...->bv...", vectors, whole[key])), key


def test_attention_of_a_frozen_network_is_batched_all_the_same() -> None:
    """Its fused operator has no batching rule: torch warns, and runs it row by row."""
    torch.manual_seed(0)
    net, x = Attention().eval().requires_grad_(False), torch.randn(3, 5, 4)
    leaves = {name: p for name, p in net.named_parameters() if "linear" in name}
    with torch.no_grad():
        found = jacobians(net, x, leaves)[1]
    for parameter in leaves.values():
        parameter.requires_grad_()
    for index, output in itertools.product(range(3), range(2)):
        gradients = torch.autograd.grad(net(x)[index, output], [*leaves.values()])
        for name, gradient in zip(leaves, gradients, strict=True):
            torch.testing.assert_close(found[name][index, output], gradient)


def test_chunks_join_to_the_whole_and_stay_small() -> None:
    net, x = nn.Linear(3, 2).eval(), torch.randn(7, 3)
    parameters = {"bias": net.bias}
    whole, found = jacobians(net, x, parameters)
    parts = list(jacobian_chunks(net, x, parameters, outputs=2, chunk_bytes=3 * 2 * 8))
    assert [len(values) for _, values, _ in parts] == [3, 3, 1]
    assert torch.allclose(torch.cat([values for _, values, _ in parts]), whole)
    assert torch.allclose(torch.cat([each["bias"] for _, _, each in parts]), found["bias"])


LIKELIHOODS: dict[str, tuple[Likelihood, int, Tensor]] = {
    "categorical": (Categorical(), 4, torch.arange(4)),
    "bernoulli": (Bernoulli(), 1, torch.tensor([[0.0], [1.0]])),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_curvature_is_the_expected_outer_product_of_gradients_of_classes(name: str) -> None:
    likelihood, size, labels = LIKELIHOODS[name]
    outputs = torch.randn(3, size, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    factors = likelihood.curvature_factors(outputs)
    for index in range(3):
        row = outputs[index : index + 1].requires_grad_()
        expected = torch.zeros(size, size, dtype=torch.double)
        for label in labels:
            nll = likelihood.nll(row, label[None])
            (gradient,) = torch.autograd.grad(nll, row, retain_graph=True)
            expected += (-nll).exp().item() * gradient.T @ gradient
        assert torch.allclose(factors[:, index].T @ factors[:, index], expected)


@pytest.mark.parametrize(
    "likelihood", [GaussianNoise(0.3), GaussianNoise([0.3, 2.0]), GaussianNoise(heteroscedastic=True)]
)
def test_curvature_of_gaussians_is_the_expected_hessian(likelihood: GaussianNoise) -> None:
    """E[(y − μ)²] = σ², so the Hessian at a target one σ away in each entry is the expected one but for odd terms."""
    likelihood = likelihood.double()
    size = 4 if likelihood.heteroscedastic else 2
    outputs = torch.randn(1, size, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    mean, std = (moment.detach() for moment in likelihood.moments(outputs))
    hessians = [
        torch.autograd.functional.hessian(lambda f, s=sign: likelihood.nll(f, mean + s * std), outputs)
        for sign in (-1.0, 1.0)
    ]
    expected = (0.5 * (hessians[0] + hessians[1])).reshape(size, size)
    factors = likelihood.curvature_factors(outputs).detach()[:, 0]
    assert torch.allclose(factors.T @ factors, expected)


@pytest.mark.parametrize(
    ("likelihood", "shape"),
    [
        (Categorical(), (3, 4)),
        (Categorical(), (3, 2, 4)),
        (Categorical(), (3, 2, 2, 4)),
        (Bernoulli(), (3,)),
        (Bernoulli(), (3, 1)),
        (GaussianNoise(0.3), (3,)),
        (GaussianNoise(0.3), (3, 4)),
        (GaussianNoise([0.3, 2.0]), (3, 5, 2)),
        (GaussianNoise(heteroscedastic=True), (3, 4)),
        (GaussianNoise(heteroscedastic=True), (3, 2, 4)),
    ],
)
def test_sums_and_diagonals_are_those_of_the_factors(likelihood: Likelihood, shape: tuple[int, ...]) -> None:
    outputs = torch.randn(shape, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    factors = likelihood.double().curvature_factors(outputs).detach()
    factors = factors.reshape(*factors.shape[:2], -1)
    each = torch.einsum("vbi,vbj->bij", factors, factors)
    assert torch.allclose(likelihood.curvature_sum(outputs), each.sum(0))
    assert torch.allclose(likelihood.curvature_diagonal(outputs), each.diagonal(dim1=1, dim2=2))


def test_positions_of_one_example_are_independent() -> None:
    """An example's cross-entropy is the mean over its positions, and so is the Hessian."""
    outputs = torch.randn(1, 3, 4, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([[0, 3, 1]])
    hessian = torch.autograd.functional.hessian(lambda f: Categorical().nll(f.view(1, 3, 4), y), outputs.flatten())
    factors = Categorical().curvature_factors(outputs).flatten(1)
    assert torch.allclose(factors.T @ factors, hessian)
