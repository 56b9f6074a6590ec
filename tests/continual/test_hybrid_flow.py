"""The flow of the hybrid model: exact inverses, log-determinants against autograd, no global randomness."""

import math

import pytest
import torch
from torch import Tensor, nn

from credo.continual.hybrid.flow import Flow
from credo.continual.hybrid.layers import ActNorm, CosineTransform, LogitSqueeze


def shaken(flow: Flow, std: float = 0.3) -> Flow:
    """The flow with random weights, since it starts as the identity."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=std)
    return flow


def inputs(rows: int, features: int) -> Tensor:
    return torch.rand(rows, features, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("order", ["permuted", "swapped"])
@pytest.mark.parametrize("actnorm", [False, True])
@pytest.mark.parametrize("squeeze", [0.0, 0.9])
@pytest.mark.parametrize("features", [6, 7])
def test_the_inverse_undoes_the_flow_and_the_log_determinant_is_autograds(
    order: str, actnorm: bool, squeeze: float, features: int
) -> None:
    flow = Flow(features, couplings=4, hidden=8, order=order, actnorm=actnorm, squeeze=squeeze).double()
    x = inputs(5, features).double()
    flow.initialise_(x)
    shaken(flow)
    z, log_det = flow(x)
    assert (z - x).abs().max() > 0.1, "not the identity"
    torch.testing.assert_close(flow.inverse(z), x, atol=1e-10, rtol=0)
    for row, found in zip(x, log_det, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda one: flow(one[None])[0][0], row)
        torch.testing.assert_close(found, torch.linalg.slogdet(jacobian).logabsdet)


@pytest.mark.parametrize("squeeze", [0.0, 0.9])
def test_a_flow_of_frequencies_has_its_inverse_and_the_log_determinant_of_autograd(squeeze: float) -> None:
    flow = Flow(16, couplings=3, hidden=8, low=2, actnorm=True, squeeze=squeeze).double()
    x = inputs(5, 16).double()
    flow.initialise_(x)
    shaken(flow, std=0.1)
    z, log_det = flow(x)
    torch.testing.assert_close(flow.inverse(z), x, atol=1e-6, rtol=0)
    for row, found in zip(x, log_det, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda one: flow(one[None])[0][0], row)
        torch.testing.assert_close(found, torch.linalg.slogdet(jacobian).logabsdet, atol=1e-5, rtol=0)
    high = torch.autograd.functional.jacobian(lambda one: flow(one[None])[0][0, :4], x[0])
    if not squeeze:  # low frequencies of z are functions of the low frequencies of x alone
        other = CosineTransform(16, 2).double().matrix[4:]
        torch.testing.assert_close(high @ other.T, torch.zeros(4, 12).double(), atol=1e-6, rtol=0)


def test_the_cosine_transform_equals_its_sum_with_low_frequencies_first() -> None:
    layer, side = CosineTransform(25, 2), 5
    image = inputs(1, 25)
    found = layer(image)[0][0]

    def frequency(row: int, column: int) -> float:
        total = 0.0
        for i in range(side):
            for j in range(side):
                waves = math.cos(math.pi * (i + 0.5) * row / side) * math.cos(math.pi * (j + 0.5) * column / side)
                total += float(image[0, side * i + j]) * waves
        return total * math.prod(math.sqrt((2 if index else 1) / side) for index in (row, column))

    first = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (0, 4), (1, 2)]
    assert found[:8].tolist() == pytest.approx([frequency(*place) for place in first], abs=1e-5)
    assert float(found[-1]) == pytest.approx(frequency(4, 4), abs=1e-5)
    torch.testing.assert_close(layer.inverse(layer(image)[0]), image, atol=1e-6, rtol=0)
    for features, low in ((24, 2), (25, 5), (25, 1)):
        with pytest.raises(ValueError, match=f"low={low} with {features} features"):
            CosineTransform(features, low)


def test_the_inverse_holds_to_1e_minus_5_in_single_precision_at_the_size_of_images() -> None:
    flow = shaken(Flow(784, couplings=8, hidden=32, squeeze=0.9), std=0.02)
    x = inputs(16, 784)
    assert (flow.inverse(flow(x)[0]) - x).abs().max() < 1e-5


def test_the_squeeze_is_undone_wholly_so_black_and_white_stay() -> None:
    squeeze = LogitSqueeze(0.9)
    ends = torch.tensor([[0.0, 1.0, 0.25]])
    torch.testing.assert_close(squeeze.inverse(squeeze(ends)[0]), ends)


def test_actnorm_standardises_but_does_not_blow_up_a_constant_feature() -> None:
    x = inputs(200, 3)
    x[:, 1] = 0.5
    layer = ActNorm(3)
    layer.initialise_(x)
    y, log_det = layer(x)
    torch.testing.assert_close(y.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(y.std(0)[[0, 2]], torch.ones(2))
    torch.testing.assert_close(layer.log_scale[1].exp(), torch.tensor(10.0))
    torch.testing.assert_close(log_det, layer.log_scale.sum().expand(200))


def test_a_single_row_sets_the_mean_of_actnorm_alone() -> None:
    layer, x = ActNorm(3), inputs(1, 3)
    layer.initialise_(x)
    torch.testing.assert_close(layer(x)[0], torch.zeros(1, 3))
    assert torch.equal(layer.log_scale, torch.zeros(3))


def test_a_flow_starts_as_the_identity_equal_by_seed_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = (Flow(6, order="swapped", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    x = inputs(3, 6)
    z, log_det = first(x)
    assert torch.equal(z, x)
    assert torch.equal(log_det, torch.zeros(3))
    weights = [nn.utils.parameters_to_vector(flow.parameters()) for flow in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_every_feature_is_mapped_by_some_coupling_and_conditions_another() -> None:
    for order in ("permuted", "swapped"):
        flow = shaken(Flow(7, couplings=2, hidden=8, order=order))
        jacobian = torch.autograd.functional.jacobian(lambda one, flow=flow: flow(one[None])[0][0], inputs(1, 7)[0])
        assert ((jacobian.abs() > 1e-4).sum(0) > 1).all()
        assert ((jacobian.abs() > 1e-4).sum(1) > 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": 1}, "two halves"),
        ({"couplings": 0}, "couplings=0"),
        ({"order": "permutd"}, "permuted"),
        ({"scale": 0.0}, "scale=0.0 must be positive"),
        ({"squeeze": 1.5}, "between 0 and 1"),
    ],
)
def test_bad_settings_raise(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Flow(**{"features": 4, **options})  # type: ignore[arg-type]
