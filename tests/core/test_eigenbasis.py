"""Squared gradients of single examples in the eigenvectors of Kronecker factors, against the definition."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.kronecker import eigenbasis as module
from credo.core.kronecker.eigenbasis import carried_over, eigenbasis, kronecker_variances, summed_squares
from credo.core.kronecker.factors import matrix_shape, to_matrix

DOUBLE = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def orthogonal(groups: int, size: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(groups, size, size, seed=seed))[0]


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "one position": (lambda: nn.Linear(5, 3), (5,)),
    "no bias": (lambda: nn.Linear(5, 3, bias=False), (5,)),
    "few positions": (lambda: nn.Linear(5, 3), (2, 5)),
    "many positions": (lambda: nn.Linear(5, 3), (4, 6, 5)),
    "convolution": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 5, 4)),
    "groups": (lambda: nn.Conv2d(4, 6, (2, 1), stride=2, groups=2, padding_mode="circular", padding=1), (4, 5, 4)),
    "one output position": (lambda: nn.Conv1d(3, 40, 2), (3, 2)),
    "no bias, dilated": (lambda: nn.Conv1d(3, 4, 2, dilation=2, bias=False), (3, 9)),
}


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("chunk", [1 << 22, 100])
def test_squares_are_those_of_each_examples_gradient(
    name: str, calls: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    torch.manual_seed(0)
    build, shape = LAYERS[name]
    layer = build().double()
    xs = [normal(7, *shape, seed=seed) for seed in range(calls)]
    gs = [normal(*layer(x).shape, seed=10 + seed) for seed, x in enumerate(xs)]
    groups, rows, columns = matrix_shape(layer, bias=layer.bias is not None)
    inputs, outputs = orthogonal(groups, columns, 1), orthogonal(groups, rows, 2)
    found = summed_squares(layer, list(zip(xs, gs, strict=True)), inputs, outputs, bias=layer.bias is not None)
    exact = torch.zeros(groups, rows, columns, dtype=DOUBLE)
    for example in range(7):
        loss = sum(
            (layer(x[example : example + 1]) * g[example : example + 1]).sum() for x, g in zip(xs, gs, strict=True)
        )
        slopes = torch.autograd.grad(loss, list(layer.parameters()))
        matrix = to_matrix(slopes[0], slopes[1] if len(slopes) > 1 else None, groups)
        exact += (outputs.mT @ matrix @ inputs).square()
    torch.testing.assert_close(found, exact)


def test_eigenvectors_make_the_matrix_again_and_rounding_leaves_no_negative_eigenvalue() -> None:
    rows = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    matrix = rows.mT @ rows  # of rank 2
    values, vectors = eigenbasis(matrix)
    assert (values >= 0).all()
    assert (torch.linalg.eigvalsh(matrix) < 0).any()
    torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mT, matrix, rtol=1e-4, atol=1e-5)


def test_a_matrix_that_is_not_finite_spoils_its_own_group_only() -> None:
    matrix = torch.eye(3).repeat(2, 1, 1)
    matrix[1, 0, 2] = torch.inf
    values, vectors = eigenbasis(matrix)
    assert values[0].isfinite().all()
    assert vectors[0].isfinite().all()
    assert values[1].isnan().all()
    assert vectors[1].isnan().all()


def test_without_convergence_double_precision_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.linalg.eigh

    def fails(matrix: Tensor) -> Any:
        if matrix.dtype is torch.float32:
            raise torch.linalg.LinAlgError("The algorithm failed to converge")
        return plain(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    values, vectors = eigenbasis(torch.diag(torch.tensor([2.0, 1.0]))[None])
    assert vectors.dtype is torch.float32
    assert values.tolist() == [[1.0, 2.0]]


def dense(variances: Tensor, inputs: Tensor, outputs: Tensor) -> Tensor:
    whole = torch.kron(outputs[0], inputs[0])
    return whole @ torch.diag(variances[0].flatten()) @ whole.T


def test_carried_over_is_the_diagonal_of_the_same_matrix_in_the_new_basis() -> None:
    old, new = ((orthogonal(1, 4, seed), orthogonal(1, 3, seed + 1)) for seed in (0, 2))
    variances = normal(1, 3, 4).square()
    whole = torch.kron(new[1][0], new[0][0])
    exact = (whole.T @ dense(variances, *old) @ whole).diagonal().view(1, 3, 4)
    torch.testing.assert_close(carried_over(variances, old, new), exact)


def test_signs_and_order_of_eigenvectors_do_not_matter() -> None:
    old = (orthogonal(1, 4, 0), orthogonal(1, 3, 1))
    order = torch.tensor([2, 0, 3, 1])
    variances = normal(1, 3, 4).square()
    moved = carried_over(variances, old, (-old[0][..., order], old[1]))
    torch.testing.assert_close(moved, variances[..., order])


def test_no_variances_are_nearer_to_the_fisher_matrix() -> None:
    """In the norm of all entries; those of the Kronecker product and any others are further away."""
    torch.manual_seed(0)
    layer, x, y = nn.Linear(4, 3).double(), normal(20, 4), torch.arange(20) % 3
    loss = F.cross_entropy(out := layer(x), y, reduction="sum")
    (g,) = torch.autograd.grad(loss, out)
    rows = torch.cat([x, torch.ones(20, 1)], 1)
    slopes = (g.unsqueeze(2) * rows.unsqueeze(1)).flatten(1)
    fisher = slopes.T @ slopes / 20
    inputs, outputs = (rows.T @ rows / 20)[None], (g.T @ g / 20)[None]
    (by_input, u), (by_output, v) = eigenbasis(inputs), eigenbasis(outputs)
    best = summed_squares(layer, [(x, g)], u, v, bias=True) / 20

    def distance(variances: Tensor) -> float:
        return float((dense(variances, u, v) - fisher).norm())

    torch.testing.assert_close(dense(kronecker_variances(by_input, by_output), u, v), torch.kron(outputs[0], inputs[0]))
    assert distance(best) < distance(kronecker_variances(by_input, by_output))
    for seed in range(20):
        assert distance(best) < distance(best + 0.01 * normal(1, 3, 5, seed=seed))
