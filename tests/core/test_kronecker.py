"""Kronecker factors against loops over examples and positions, and the algebra of their inverses against dense one."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from credo.core.errors import NonFiniteError
from credo.core.kronecker.factors import (
    factored_dampings,
    from_matrix,
    inner_product,
    input_moments,
    inverse_root,
    inverse_roots,
    matrix_shape,
    output_moments,
    own_product,
    patches,
    product,
    root_product,
    row_count,
    to_matrix,
)

LINEAR: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "rows": (nn.Linear(4, 3), (5, 4)),
    "positions": (nn.Linear(4, 3), (5, 2, 3, 4)),
    "no bias": (nn.Linear(4, 3, bias=False), (5, 4)),
}
CONVS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d": (nn.Conv1d(2, 3, 3), (2, 2, 6)),
    "2d": (nn.Conv2d(2, 3, (2, 3)), (2, 2, 4, 5)),
    "3d": (nn.Conv3d(1, 2, 2, padding=1, stride=2), (2, 1, 3, 2, 4)),
    "stride and padding": (nn.Conv2d(2, 3, 3, stride=(2, 1), padding=(1, 2)), (2, 2, 4, 3)),
    "dilation": (nn.Conv2d(2, 2, 2, dilation=(2, 1)), (2, 2, 4, 3)),
    "stride, dilation, cut off": (nn.Conv1d(1, 2, 2, stride=3, dilation=2), (2, 1, 9)),
    "groups": (nn.Conv2d(4, 6, 2, groups=2), (2, 4, 3, 3)),
    "depthwise": (nn.Conv2d(3, 3, 3, padding=1, groups=3, bias=False), (2, 3, 3, 3)),
    "same": (nn.Conv2d(2, 2, (2, 3), padding="same"), (2, 2, 3, 3)),
    "valid": (nn.Conv1d(2, 2, 2, padding="valid"), (2, 2, 4)),
    "circular": (nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), (2, 1, 3, 4)),
    "reflect": (nn.Conv1d(1, 2, 3, padding=2, padding_mode="reflect"), (2, 1, 5)),
    "one by one": (nn.Conv2d(3, 2, 1), (2, 3, 2, 2)),
}


def made(layer: nn.Module, shape: tuple[int, ...]) -> tuple[Any, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    layer = layer.double()
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return layer, x, torch.randn(layer(x).shape, generator=generator, dtype=torch.float64)


def moment_sums(layer: nn.Module, x: Tensor, g: Tensor, *, bias: bool) -> tuple[Tensor, Tensor, int]:
    rows = row_count(layer, g)
    return input_moments(layer, x, positions=rows // len(x), bias=bias), output_moments(layer, g), rows


def with_one(row: Tensor, bias: bool) -> Tensor:
    return torch.cat([row, row.new_ones(1)]) if bias else row


@pytest.fixture(params=["small", "large"])
def work(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products as they are made of small and of large layers."""
    if request.param == "large":
        monkeypatch.setattr("credo.core.kronecker.factors._LARGE_GRAM", 0)
        monkeypatch.setattr("credo.core.kronecker.factors._LARGE", 0)
        monkeypatch.setattr("credo.core.kronecker.factors.LARGE_INVERSE", 0)
        monkeypatch.setattr("credo.core.kronecker.factors._LEAST", 2)
        monkeypatch.setattr("credo.core.kronecker.shared_rows.LARGE_WORK", 0)


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("name", LINEAR)
def test_moments_of_a_linear_layer_are_sums_over_rows(name: str) -> None:
    layer, x, g = made(*LINEAR[name])
    bias = layer.bias is not None
    a, b, rows = moment_sums(layer, x, g, bias=bias)
    inputs = [with_one(row, bias) for row in x.reshape(-1, 4)]
    torch.testing.assert_close(a, sum(torch.outer(row, row) for row in inputs).unsqueeze(0))
    torch.testing.assert_close(b, sum(torch.outer(row, row) for row in g.reshape(-1, 3)).unsqueeze(0))
    assert rows == len(inputs)


def seen_at(layer: Any, x: Tensor, example: int, group: int, place: tuple[int, ...]) -> Tensor:
    """What one position of a group's output sees: the derivative of that output by the weight of its channel."""
    channel = group * (layer.out_channels // layer.groups)
    (slope,) = torch.autograd.grad(layer(x[example : example + 1])[(0, channel, *place)], layer.weight)
    return slope[channel].flatten()


@pytest.mark.usefixtures("work")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", CONVS)
def test_moments_of_a_convolution_are_sums_over_examples_and_positions(name: str) -> None:
    layer, x, g = made(*CONVS[name])
    bias = layer.bias is not None
    a, b, rows = moment_sums(layer, x, g, bias=bias)
    places = list(itertools.product(*(range(size) for size in g.shape[2:])))
    outputs = layer.out_channels // layer.groups
    for group in range(layer.groups):
        for_inputs, for_outputs = torch.zeros_like(a[0]), torch.zeros_like(b[0])
        for example, place in itertools.product(range(len(x)), places):
            row = with_one(seen_at(layer, x, example, group, place), bias)
            gradient = g[(example, slice(group * outputs, (group + 1) * outputs), *place)]
            for_inputs += torch.outer(row, row)
            for_outputs += torch.outer(gradient, gradient)
        torch.testing.assert_close(a[group], for_inputs)
        torch.testing.assert_close(b[group], for_outputs)
    assert rows == len(x) * len(places)


SHARED = {
    "padded": (nn.Conv2d(3, 5, 3, padding=1), (2, 3, 6, 7)),
    "dilated groups": (nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2), (2, 4, 8, 7)),
    "depthwise, stride along rows": (nn.Conv2d(4, 4, (3, 5), stride=(1, 2), padding=(0, 1), groups=4), (3, 4, 9, 8)),
    "1d": (nn.Conv1d(3, 4, 5, padding=2), (2, 3, 12)),
    "3d": (nn.Conv3d(2, 3, (3, 2, 2), padding=1), (2, 2, 6, 3, 4)),
    "circular": (nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), (2, 1, 6, 4)),
}


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_moments_from_shared_rows_are_those_of_the_patches(name: str, bias: bool, weighted: bool) -> None:
    layer, x, g = made(*SHARED[name])
    weights = torch.linspace(0, 2, len(x), dtype=torch.float64) if weighted else None
    positions = row_count(layer, g) // len(x)
    found = input_moments(layer, x, positions=positions, bias=bias, weights=weights)
    groups, _, size = matrix_shape(layer, bias=False)
    # A unit vector's gradient by the weight, for each position, is the patch that it sees.
    wanted = torch.zeros_like(found)
    for example, group in itertools.product(range(len(x)), range(groups)):
        for place in itertools.product(*(range(n) for n in g.shape[2:])):
            row = with_one(seen_at(layer, x, example, group, place), bias)
            wanted[group] += torch.outer(row, row) * (1.0 if weights is None else weights[example])
    assert size + bias == found.shape[-1]
    torch.testing.assert_close(found, wanted)


def test_patches_come_in_chunks_of_examples_with_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, g = made(*CONVS["groups"])
    whole = moment_sums(layer, x, g, bias=True)
    calls = []
    monkeypatch.setattr("credo.core.kronecker.factors._CHUNK", 1)
    monkeypatch.setattr(
        "credo.core.kronecker.factors.patches", lambda layer, x: calls.append(len(x)) or patches(layer, x)
    )
    for one, other in zip(whole[:2], moment_sums(layer, x, g, bias=True)[:2], strict=True):
        torch.testing.assert_close(one, other)
    assert calls == [1, 1]


@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Linear(4, 3, bias=False), nn.Conv2d(4, 6, (2, 1), groups=2)])
def test_weight_and_bias_become_one_matrix_and_come_back(layer: Any) -> None:
    bias = layer.bias is not None
    groups = getattr(layer, "groups", 1)
    matrix = to_matrix(layer.weight, layer.bias, groups)
    assert matrix.shape == matrix_shape(layer, bias=bias)
    weight, back = from_matrix(matrix, layer.weight.shape, bias=bias)
    assert torch.equal(weight, layer.weight)
    assert (back is None) if not bias else torch.equal(back, layer.bias)


# -- damping and inverses --------------------------------------------------------------------------------------------


def positive(count: int, size: int, seed: int, scale: float = 1.0) -> Tensor:
    root = torch.randn(count, size, 2 * size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scale * root @ root.mT


def shares(a: Tensor, g: Tensor, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    for_a, for_g = factored_dampings([a], [g], [damping])
    return for_a[0], for_g[0]


def test_damping_is_split_by_the_mean_eigenvalues() -> None:
    a, g = positive(2, 4, 0, scale=100.0), positive(2, 3, 1, scale=1e-3)
    for_a, for_g = shares(a, g, 0.01)
    torch.testing.assert_close(for_a * for_g, torch.full((2,), 0.01, dtype=torch.float64))
    mean = [torch.linalg.eigvalsh(m).mean(-1) for m in (a, g)]
    torch.testing.assert_close(for_a / mean[0], for_g / mean[1])  # the same share of both
    for_a, _ = shares(a, g, torch.tensor([0.04, 0.01], dtype=torch.float64))
    assert for_a[0] / for_a[1] == pytest.approx(2 * math.sqrt(float((mean[0] / mean[1])[0] / (mean[0] / mean[1])[1])))


@pytest.mark.parametrize(("a", "g"), [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)])
def test_matrices_of_zeros_share_the_damping_equally(a: float, g: float) -> None:
    found = shares(a * torch.eye(3).unsqueeze(0), g * torch.eye(2).unsqueeze(0), 0.04)
    assert [float(share) for share in found] == pytest.approx([0.2, 0.2])


@pytest.mark.usefixtures("work")
def test_roots_are_those_of_the_damped_inverse() -> None:
    matrix, damping = positive(3, 5, 2), torch.tensor([0.1, 0.0, 2.0], dtype=torch.float64)
    root = inverse_root(matrix, damping)
    dense = torch.linalg.inv(matrix + damping.view(-1, 1, 1) * torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(root @ root.mT, dense)
    assert torch.equal(root, root.triu())
    torch.testing.assert_close(own_product(root), dense)
    given = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    left = root[:, :2, :2].triu()
    torch.testing.assert_close(root_product(left, given, root), left @ given @ root.mT)


def test_a_matrix_that_is_not_positive_definite_gets_more_damping_and_the_others_do_not() -> None:
    bad = torch.diag(torch.tensor([1.0, 1.0, -1e-3], dtype=torch.float64))
    matrix = torch.stack([bad, torch.eye(3, dtype=torch.float64)])
    root = inverse_root(matrix, torch.full((2,), 1e-5, dtype=torch.float64))
    assert torch.isfinite(root).all()
    used = 1 / (root @ root.mT).diagonal(dim1=-2, dim2=-1) - matrix.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(used[0], torch.full((3,), 1e-2, dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(used[1], torch.full((3,), 1e-5, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_singular_matrix_without_damping_has_a_finite_root(rank: int) -> None:
    row = torch.arange(1.0, 9.0) * rank
    assert torch.isfinite(inverse_root(torch.outer(row, row).unsqueeze(0), torch.zeros(1))).all()


def test_no_damping_helps_against_nan() -> None:
    with pytest.raises(NonFiniteError, match="Cholesky"):
        inverse_root(torch.full((1, 2, 2), math.nan), torch.ones(1))


def test_a_product_is_that_of_the_dense_kronecker_matrix() -> None:
    left, right = positive(1, 3, 3), positive(1, 4, 4)
    middle = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    dense = torch.kron(left[0], right[0]) @ middle.flatten()
    torch.testing.assert_close(product(left, middle, right).flatten(), dense)


@pytest.mark.parametrize("same", [True, False])
def test_several_layers_are_damped_and_inverted_as_each_alone(same: bool) -> None:
    inputs, outputs = [positive(1, 4, 0), positive(2, 3, 1)], [positive(1, 2, 2), positive(2, 5, 3)]
    dampings = [0.1, 0.1] if same else [0.1, torch.tensor([0.2, 0.3], dtype=torch.float64)]
    outputs[1][0] = torch.diag(torch.tensor([1.0, 1.0, 1.0, 1.0, -2.0], dtype=torch.float64))  # needs more damping
    found = factored_dampings(inputs, outputs, dampings)
    roots = inverse_roots([*inputs, *outputs], [*found[0], *found[1]])
    for index in (0, 1):
        alone = shares(inputs[index], outputs[index], dampings[index])
        for side, matrix in enumerate((inputs[index], outputs[index])):
            torch.testing.assert_close(found[side][index], alone[side])
            torch.testing.assert_close(roots[2 * side + index], inverse_root(matrix, alone[side]))


def test_a_matrix_that_is_not_finite_has_no_finite_root_and_the_others_have_theirs() -> None:
    good, bad = positive(1, 3, 0), positive(1, 3, 1)
    bad[0, 1, 1] = math.nan
    one = torch.ones(1, dtype=torch.float64)
    roots = inverse_roots([bad, good], [one, one])
    assert roots[0].isnan().any()
    assert torch.equal(roots[1], inverse_root(good, one))


@pytest.mark.parametrize("may_read", [True, False])
def test_an_inner_product_is_that_of_doubles_also_where_single_precision_overflows(may_read: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    left, right = ([torch.randn(*shape, generator=generator) for shape in ((2, 3), (4,))] for _ in range(2))
    for scale in (1.0, 1e25):
        scaled = [scale * tensor for tensor in left], [scale * tensor for tensor in right]
        expected = sum((a.double() * b.double()).sum() for a, b in zip(*scaled, strict=True))
        found = inner_product(*scaled, may_read=may_read)
        assert found.dtype is torch.float64
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
