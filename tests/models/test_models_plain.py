from itertools import pairwise

import pytest
import torch
from torch import nn

from credo.models import build_model


def conv(channels_in, channels_out, kernel):
    return channels_in * channels_out * kernel**2 + channels_out


def fc(size_in, size_out):
    return size_in * size_out + size_out


def conv_bn(channels_in, channels_out):
    """3x3 without bias, and BatchNorm's two numbers a channel."""
    return channels_in * channels_out * 9 + 2 * channels_out


def alexnet(a, b, c, d, e):
    """Convolutions of these channels on three-channel images, and one linear layer of ten classes."""
    return conv(3, a, 11) + conv(a, b, 5) + conv(b, c, 3) + conv(c, d, 3) + conv(d, e, 3) + fc(e, 10)


VGG_CHANNELS = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]

COUNTS = [
    ("mlp", {}, 89_610),
    ("mlp", {"hidden": (), "inputs": (4,), "classes": 3}, fc(4, 3)),
    ("lenet5", {"inputs": (3, 32, 32)}, 62_006),
    ("lenet5", {}, conv(1, 6, 5) + conv(6, 16, 5) + fc(400, 120) + fc(120, 84) + fc(84, 10)),
    ("convnet", {}, conv(1, 16, 3) + conv(16, 32, 3) + fc(32 * 4 * 4, 64) + fc(64, 10)),
    ("convnet", {"batch_norm": True}, conv_bn(1, 16) + conv_bn(16, 32) + fc(32 * 4 * 4, 64) + fc(64, 10)),
    ("alexnet", {}, alexnet(64, 192, 384, 256, 128)),
    ("alexnet", {"variant": "vogn"}, alexnet(64, 192, 384, 256, 256)),
    ("alexnet-half", {}, alexnet(32, 96, 192, 128, 64)),
    (
        "3conv3fc",
        {},
        conv(3, 32, 5) + conv(32, 64, 5) + conv(64, 128, 5) + fc(512, 1000) + fc(1000, 1000) + fc(1000, 10),
    ),
    (
        "vgg16-bn",
        {},
        sum(conv_bn(a, b) for a, b in pairwise(VGG_CHANNELS)) + fc(512, 10),
    ),
]


@pytest.mark.parametrize(("name", "options", "count"), COUNTS)
def test_number_of_parameters(name, options, count):
    assert sum(p.numel() for p in build_model(name, **options).parameters()) == count


@pytest.mark.parametrize(("name", "smallest"), [("lenet5", 16), ("3conv3fc", 23), ("alexnet", 29), ("vgg16-bn", 32)])
def test_smallest_image_works_and_one_pixel_less_is_refused(name, smallest):
    model = build_model(name, inputs=(1, smallest, smallest)).eval()
    assert model(torch.zeros(1, 1, smallest, smallest)).shape == (1, 10)
    for sides in ((smallest - 1, smallest), (smallest, smallest - 1)):
        with pytest.raises(ValueError, match=f"at least {smallest}x{smallest} pixels, got {sides[0]}x{sides[1]}"):
            build_model(name, inputs=(1, *sides))


def test_lenet5_refuses_digits_of_8x8_and_names_what_fits():
    with pytest.raises(ValueError, match=r"lenet5 needs images of at least 16x16.*convnet"):
        build_model("lenet5", inputs=(1, 8, 8))


def test_lenet5_sees_28x28_as_32x32_with_a_border_of_zeros():
    small, large = build_model("lenet5", seed=0), build_model("lenet5", inputs=(1, 32, 32), seed=0)
    x = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(small(x), large(nn.functional.pad(x, (2, 2, 2, 2))))


def test_alexnet_sees_28x28_as_32x32_with_a_border_of_zeros():
    small = build_model("alexnet", inputs=(1, 28, 28), width=0.1, activation="softplus", seed=0)
    large = build_model("alexnet", inputs=(1, 32, 32), width=0.1, activation="softplus", seed=0)
    x = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(small(x), large(nn.functional.pad(x, (2, 2, 2, 2))))


@pytest.mark.parametrize(
    ("count", "before"),
    [(1, ["fc1"]), (3, ["conv4", "conv5", "fc1"]), (5, ["conv2", "conv3", "conv4", "conv5", "fc1"])],
)
def test_alexnet_takes_dropout_before_its_last_layers(count, before):
    model = build_model("alexnet", width=0.1, dropout=0.5, dropout_layers=count)
    layers = list(model.named_children())
    assert [layers[i + 1][0] for i, (_, layer) in enumerate(layers) if isinstance(layer, nn.Dropout)] == before


@pytest.mark.parametrize("count", [0, 6, 1.5])
def test_alexnet_has_five_layers_that_can_have_dropout(count):
    with pytest.raises(ValueError, match="alexnet has 1 to 5 layers for it"):
        build_model("alexnet", dropout_layers=count)


def test_layers_of_dropout_want_its_rate():
    with pytest.raises(ValueError, match="dropout_layers=3 was given without dropout"):
        build_model("alexnet", dropout_layers=3)


def test_mlp_is_the_written_out_formula():
    model = build_model("mlp", inputs=(1, 2, 3), classes=4, hidden=(5,), activation="tanh", input_range=(-1, 3), seed=0)
    x = torch.rand(6, 1, 2, 3, generator=torch.Generator().manual_seed(0))
    hidden = torch.tanh((4 * x.reshape(6, 6) - 1) @ model.fc1.weight.T + model.fc1.bias)
    torch.testing.assert_close(model(x), hidden @ model.fc2.weight.T + model.fc2.bias)


@pytest.mark.parametrize("name", ["lenet5", "alexnet", "alexnet-half", "3conv3fc"])
def test_softplus_is_everywhere_where_relu_would_be(name):
    plain, smooth = build_model(name), build_model(name, activation="softplus", beta=3.0)
    count = sum(isinstance(module, nn.ReLU) for module in plain.modules())
    found = [module.beta for module in smooth.modules() if isinstance(module, nn.Softplus)]
    assert found == [3.0] * count
    assert count >= 4
    assert not any(isinstance(module, nn.ReLU) for module in smooth.modules())


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({"activation": "relu"}, lambda z: z.clamp(min=0)),
        ({"activation": "tanh"}, torch.tanh),
        ({"activation": "softplus"}, lambda z: torch.log(1 + torch.exp(z))),
        ({"activation": "softplus", "beta": 3.0}, lambda z: torch.log(1 + torch.exp(3 * z)) / 3),
        ({"activation": "gelu"}, lambda z: z * 0.5 * (1 + torch.erf(z / 2**0.5))),
    ],
)
def test_activations(options, formula):
    layer = build_model("mlp", hidden=(3,), **options).fc1_activation
    z = torch.linspace(-3, 3, 31)
    torch.testing.assert_close(layer(z), formula(z))


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("mlp", ["fc2", "fc3"]),
        ("lenet5", ["fc1", "fc2", "fc3"]),
        ("convnet", ["fc1", "fc2"]),
        ("alexnet", ["fc1"]),
        ("3conv3fc", ["fc1", "fc2", "fc3"]),
        ("vgg16-bn", ["fc1"]),
    ],
)
def test_dropout_is_on_what_fully_connected_layers_read_but_not_on_raw_inputs(name, before):
    model = build_model(name, dropout=0.3)
    layers = list(model.named_children())
    dropped = [layers[i + 1][0] for i, (_, layer) in enumerate(layers) if isinstance(layer, nn.Dropout)]
    assert dropped == before
    assert {layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)} == {0.3}


def test_dropout_changes_no_parameter_name():
    assert list(build_model("lenet5", dropout=0.3).state_dict()) == list(build_model("lenet5").state_dict())
