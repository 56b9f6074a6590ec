import numpy as np
import pytest
import torch

import credo
from credo.models import Normalize, build_model, input_statistics, normalized


def test_each_channel_is_shifted_and_scaled_by_its_own_numbers():
    x = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    mean, std = (0.1, 0.2, 0.3), (0.5, 2.0, 4.0)
    out = Normalize(mean, std)(x)
    for channel in range(3):
        torch.testing.assert_close(out[:, channel], (x[:, channel] - mean[channel]) / std[channel])


def test_plain_features_are_scaled_one_by_one():
    x = torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    out = Normalize((1.0, 10.0), (2.0, 20.0), axes=0)(x)
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


def test_one_number_serves_all_channels():
    x = torch.tensor([0.0, 0.5, 1.0])
    torch.testing.assert_close(Normalize(0.5, 0.25)(x), torch.tensor([-2.0, 0.0, 2.0]))


def test_default_changes_no_bit():
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Normalize()(x), x)


def test_scale_multiplies_the_result():
    x = torch.tensor([0.0, 0.25, 1.0])
    assert torch.equal(Normalize(scale=2)(x), torch.tensor([0.0, 0.5, 2.0]))
    torch.testing.assert_close(Normalize(0.25, 0.5, scale=3)(x), 3 * (x - 0.25) / 0.5)


@pytest.mark.parametrize(("low", "high"), [(0, 2), (-1, 1), (-0.42, 2.82), (3, 7)])
def test_to_range_maps_the_unit_interval(low, high):
    x = torch.tensor([0.0, 0.25, 1.0])
    torch.testing.assert_close(Normalize.to_range(low, high)(x), low + (high - low) * x)


def test_numbers_are_buffers_that_follow_the_dtype():
    layer = Normalize((0.1, 0.2), (1.0, 2.0))
    assert list(layer.parameters()) == []
    assert set(layer.state_dict()) == {"mean", "std"}
    assert layer.double()(torch.zeros(1, 2, 3, 3, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"std": 0.0}, "std must be positive"),
        ({"std": (1.0, -1.0)}, "std must be positive"),
        ({"mean": float("nan")}, "mean must be finite"),
        ({"mean": (0.0, 0.0), "std": (1.0, 1.0, 1.0)}, "2 means but 3 stds"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"mean": ((0.0,),)}, "one for each channel"),
    ],
)
def test_bad_numbers_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Normalize(**arguments)


def test_empty_range_is_refused():
    with pytest.raises(ValueError, match="low < high"):
        Normalize.to_range(1, 1)


def test_model_with_normalize_equals_model_on_normalised_inputs():
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    inside = build_model("lenet5", inputs=(3, 32, 32), normalize=(mean, std), seed=0)
    outside = build_model("lenet5", inputs=(3, 32, 32), seed=0)
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    normalised = torch.stack([(x[:, c] - mean[c]) / std[c] for c in range(3)], dim=1)
    torch.testing.assert_close(inside(x), outside(normalised))


@pytest.mark.parametrize("normalize", [((0.5,), (0.5,)), ((0.5, 0.5), 0.5), (0.5, (0.1, 0.2))])
def test_wrong_number_of_channels_is_refused(normalize):
    with pytest.raises(ValueError, match="inputs with 3 channels"):
        build_model("resnet20", normalize=normalize)


@pytest.mark.parametrize("normalize", [0.5, (0.5,), (0.5, 0.5, 0.5)])
def test_what_is_no_pair_is_refused(normalize):
    with pytest.raises(ValueError, match="pair"):
        build_model("mlp", normalize=normalize)


def blocks(x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(part, torch.zeros(len(part))) for part in x.split(7)]


@pytest.mark.parametrize("scale", [1.0, 255.0])
@pytest.mark.parametrize("shape", [(100, 3, 4, 5), (100, 6), (100, 3, 9)])
def test_statistics_equal_those_of_numpy_in_one_piece_or_in_batches(scale, shape):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * scale
    x[:, 1] = 0.1 * scale
    values = x.numpy().astype(np.float64)
    axes = tuple(axis for axis in range(x.dim()) if axis != 1)
    std = values.std(axes)
    std[1] = 1
    for inputs in (x, blocks(x), [part for part, _ in blocks(x)], iter(blocks(x))):
        found = input_statistics(inputs)
        np.testing.assert_allclose(found[0], values.mean(axes), rtol=1e-12)
        np.testing.assert_allclose(found[1], std, rtol=1e-12)


def test_far_from_zero_and_constant_up_to_rounding():
    x = torch.full((1000, 2), 0.1, dtype=torch.float64)
    x[:, 1] = 1e6 + torch.arange(1000) % 2
    mean, std = input_statistics(blocks(x))
    assert (mean[0], std[0]) == (0.1, 1.0)
    assert (mean[1], std[1]) == pytest.approx((1e6 + 0.5, 0.5), rel=1e-9)


def test_a_nearly_constant_feature_keeps_every_training_value_within_ten_deviations():
    x = torch.zeros(1000, 2, dtype=torch.float64)
    x[0, 0], x[::2, 1] = 4.0, 1.0
    mean, std = input_statistics(blocks(x))
    assert (mean[0], std[0]) == pytest.approx((0.004, (4 - 0.004) / 10))  # its standard deviation is 0.126
    assert std[1] == pytest.approx(0.5)


def test_own_networks_get_it_as_a_first_layer():
    x = 50 + 20 * torch.rand(64, 3)
    net = torch.nn.Sequential(torch.nn.Linear(3, 2))
    model = normalized(net, x)
    assert [name for name, _ in model.named_children()] == ["normalize", "model"]
    scaled = (x - x.mean(0)) / x.std(0, correction=0)
    torch.testing.assert_close(model(x), net(scaled), rtol=1e-4, atol=1e-5)
    assert {name for name, _ in model.named_buffers()} == {"normalize.mean", "normalize.std"}
    double = normalized(torch.nn.Linear(3, 2).double(), x)
    assert double.normalize.mean.dtype == torch.float64


def test_features_may_come_last():
    x = torch.rand(20, 5, 2) * torch.tensor([1.0, 100.0])
    model = normalized(torch.nn.Identity(), x, axes=0)
    torch.testing.assert_close(model(x).std((0, 1), correction=0), torch.ones(2))


def test_tokens_are_untouched():
    net = torch.nn.Embedding(10, 2)
    tokens = torch.arange(10).reshape(5, 2)
    assert normalized(net, tokens) is net
    assert input_statistics([(tokens, None)]) is None


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.zeros(4, 3, dtype=torch.uint8), "as the network gets them, such as x / 255"),
        (torch.tensor([[1.0, float("nan")]]), "NaN or infinite in channel 1"),
        (torch.zeros(4), r"must be \[n, channels"),
        (torch.zeros(0, 3), "there are no inputs"),
        ([{"x": 1}], "got dict"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], "3 channels in one batch and 4"),
    ],
)
def test_inputs_without_statistics_raise(inputs, message):
    with pytest.raises(ValueError, match=message):
        input_statistics(inputs)


def test_a_saved_posterior_keeps_them(tmp_path):
    x = 5 + torch.rand(30, 3)
    model = normalized(torch.nn.Linear(3, 2), x)
    posterior = credo.MAP(model, data_size=30)
    credo.save(posterior, tmp_path / "a.safetensors")
    again = credo.load(tmp_path / "a.safetensors", model=normalized(torch.nn.Linear(3, 2), torch.rand(4, 3)))
    assert torch.equal(again.model(x), model(x))
