import pytest
import torch

from credo.models import Normalize, build_model


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
