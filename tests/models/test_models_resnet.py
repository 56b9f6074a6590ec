import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from credo.models import build_model, load_cifar_resnet_weights
from credo.models.resnet import PadShortcut


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("resnet20", {}, 269_722),
        ("resnet56", {}, 853_018),
        ("resnet-cifar", {"depth": 20}, 269_722),
        ("resnet-cifar", {"depth": 110}, 1_727_962),
        ("resnet18", {}, 11_173_962),
        ("resnet18", {"stem": "imagenet", "classes": 1000}, 11_689_512),
    ],
)
def test_number_of_parameters_is_the_published_one(name, options, expected):
    assert count(build_model(name, **options)) == expected


@pytest.mark.parametrize("depth", [8, 14, 20])
def test_depth_counts_convolutions_and_the_linear_layer(depth):
    model = build_model("resnet-cifar", depth=depth)
    assert sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in model.modules()) == depth


@pytest.mark.parametrize(("channels_in", "channels_out", "stride"), [(2, 4, 2), (3, 6, 2), (2, 5, 1), (1, 1, 3)])
def test_pad_shortcut_equals_a_loop_over_pixels(channels_in, channels_out, stride):
    x = torch.rand(2, channels_in, 7, 6, generator=torch.Generator().manual_seed(0))
    before = (channels_out - channels_in) // 2
    expected = torch.zeros(2, channels_out, -(-7 // stride), -(-6 // stride))
    for channel in range(channels_in):
        for row in range(0, 7, stride):
            for column in range(0, 6, stride):
                target = expected[:, before + channel, row // stride, column // stride]
                target.copy_(x[:, channel, row, column])
    assert torch.equal(PadShortcut(channels_in, channels_out, stride)(x), expected)


def test_shortcuts_of_the_cifar_family_have_no_parameters():
    names = [name for name, _ in build_model("resnet20").named_parameters()]
    assert not any("shortcut" in name for name in names)


@pytest.mark.parametrize(("name", "stem", "side"), [("resnet20", None, 8), ("resnet18", "cifar", 4)])
def test_resolution_before_the_average(name, stem, side):
    model = build_model(name, **({"stem": stem} if stem else {}))
    seen = []
    model.pool.register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0].shape[2:]))
    model(torch.zeros(2, 3, 32, 32))
    assert seen == [(side, side)]


def test_imagenet_stem_quarters_the_resolution():
    model = build_model("resnet18", stem="imagenet")
    seen = []
    model.layer1.register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0].shape[1:]))
    model(torch.zeros(2, 3, 64, 64))
    assert seen == [(64, 16, 16)]


def test_convolutions_start_at_the_scale_of_he():
    weight = build_model("resnet18", seed=0).layer4[0].conv1.weight  # 256 channels in, 512 out
    # 1.2 million normal draws: the relative error of their std is 0.00065, so 0.5 % is 7.7 of these (1e-14).
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.005)


def public_form(model):
    """The tensors under which the public files store a model."""
    keys = [key for key in model.state_dict() if "normalize" not in key and "num_batches" not in key]
    return {key: model.state_dict()[key].contiguous() for key in keys}


def test_weights_of_a_file_replace_those_of_the_model(tmp_path):
    source = build_model("resnet-cifar", depth=8, seed=0)
    source(torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)))  # moves the running statistics
    save_file(public_form(source), tmp_path / "weights.safetensors")
    model = build_model("resnet-cifar", depth=8, seed=1)
    load_cifar_resnet_weights(model, tmp_path / "weights.safetensors")
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.eval()(x), source.eval()(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 14}, "layer1.1.conv1.weight: not in the file"),
        ({"depth": 8, "classes": 3}, r"linear.weight: \(10, 64\) in the file, \(3, 64\) in the model"),
    ],
)
def test_weights_of_another_architecture_are_refused_and_change_nothing(tmp_path, options, message):
    save_file(public_form(build_model("resnet-cifar", depth=8, seed=0)), tmp_path / "weights.safetensors")
    model = build_model("resnet-cifar", **options, seed=1)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_cifar_resnet_weights(model, tmp_path / "weights.safetensors")
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_surplus_weights_are_refused(tmp_path):
    save_file(public_form(build_model("resnet-cifar", depth=14, seed=0)), tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"layer1\.1\.bn1\.bias: not in the model"):
        load_cifar_resnet_weights(build_model("resnet-cifar", depth=8), tmp_path / "weights.safetensors")


# The first images of the test set that the public weights classify rightly. All 10 000: 9173 and 9339, the
# published errors of 8.27 % and 6.61 %.
@pytest.mark.parametrize(("name", "images", "right"), [("resnet20", 1000, 915), ("resnet56", 500, 470)])
def test_public_weights_reach_their_accuracy(name, images, right):
    data = Path(os.environ.get("CREDO_DATA", "/nonexistent"))
    weights = data / "weights" / f"{name}-cifar10.safetensors"
    batch = data / "cifar10" / "cifar-10-batches-bin" / "test_batch.bin"
    if not weights.exists() or not batch.exists():
        pytest.skip("needs CREDO_DATA with CIFAR-10 and the public ResNet weights")
    rows = torch.from_numpy(np.fromfile(batch, dtype=np.uint8, count=images * 3073)).reshape(images, 3073)
    model = build_model(name).eval()
    load_cifar_resnet_weights(model, weights)
    with torch.inference_mode():
        chunks = [model(x.reshape(-1, 3, 32, 32) / 255).argmax(1) for x in rows[:, 1:].split(250)]
    # Rounding may differ between machines and flip an image whose two best classes are nearly equal.
    assert int((torch.cat(chunks) == rows[:, 0]).sum()) == pytest.approx(right, abs=2)


@pytest.mark.parametrize("inputs", [(1, 28, 28), (4, 32, 32)])
def test_the_default_normalisation_is_for_three_channels(inputs):
    model = build_model("resnet20", inputs=inputs, seed=0)
    x = torch.rand(2, *inputs, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.normalize(x), x)
    spec = model.credo_spec
    again = build_model(spec["name"], **spec["options"])
    assert torch.equal(model.eval()(x), again.eval()(x))
    given = build_model("resnet20", inputs=inputs, normalize=(0.5, 0.25))
    torch.testing.assert_close(given.normalize(x), (x - 0.5) / 0.25)
    with pytest.raises(ValueError, match="normalize has 3 values"):
        build_model("resnet20", inputs=inputs, normalize=((0.4, 0.4, 0.4), (0.2, 0.2, 0.2)))
    colour = build_model("resnet20").normalize
    torch.testing.assert_close(colour.mean.reshape(-1), torch.tensor([0.485, 0.456, 0.406]))


def norm(x, layer):
    """BatchNorm with its running statistics, written out."""
    mean, var, scale, shift = (
        tensor[:, None, None] for tensor in (layer.running_mean, layer.running_var, layer.weight, layer.bias)
    )
    return (x - mean) / (var + 1e-5).sqrt() * scale + shift


def bottleneck(x, block, stride):
    """Torchvision's block (v1.5): the 3x3 convolution has the stride, and the projection its own BatchNorm."""
    out = norm(F.conv2d(x, block.conv1.weight), block.bn1).clamp(min=0)
    out = norm(F.conv2d(out, block.conv2.weight, stride=stride, padding=1), block.bn2).clamp(min=0)
    out = norm(F.conv2d(out, block.conv3.weight), block.bn3)
    if block.downsample is not None:
        x = norm(F.conv2d(x, block.downsample[0].weight, stride=stride), block.downsample[1])
    return (out + x).clamp(min=0)


def wide_block(x, block, stride):
    """Zagoruyko and Komodakis' block: the projection reads what BatchNorm and ReLU made of the input."""
    active = norm(x, block.bn1).clamp(min=0)
    out = F.conv2d(active, block.conv1.weight, stride=stride, padding=1)
    out = F.conv2d(norm(out, block.bn2).clamp(min=0), block.conv2.weight, padding=1)
    return out + (x if block.shortcut is None else F.conv2d(active, block.shortcut.weight, stride=stride))


def trained(name, **options):
    """A model in eval mode whose BatchNorms have been somewhere; double precision, for a deep network's sake."""
    model = build_model(name, **options, seed=0).double().eval()
    generator = torch.Generator().manual_seed(1)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (layer.running_mean, layer.bias.data):
                tensor.normal_(0, 0.3, generator=generator)
            for tensor in (layer.running_var, layer.weight.data):
                tensor.uniform_(0.5, 1.5, generator=generator)
    return model


WRITTEN_OUT = [
    ("resnet50", {"width": 4}, bottleneck, (1, 2, 2, 2)),
    ("wide-resnet", {"depth": 16, "widen": 2}, wide_block, (1, 2, 2)),
]


@pytest.mark.parametrize(("name", "options", "block", "strides"), WRITTEN_OUT)
def test_blocks_are_the_written_out_ones(name, options, block, strides):
    model = trained(name, **options)
    generator = torch.Generator().manual_seed(2)
    for number, stride in enumerate(strides, start=1):
        first, second = model.get_submodule(f"layer{number}")[:2]
        for layer, step in ((first, stride), (second, 1)):
            x = torch.randn(2, layer.conv1.in_channels, 7, 6, generator=generator, dtype=torch.float64)
            torch.testing.assert_close(layer(x), block(x, layer, step))


@pytest.mark.parametrize(("name", "options", "block", "strides"), WRITTEN_OUT)
def test_networks_are_the_written_out_ones(name, options, block, strides):
    model = trained(name, **options, inputs=(3, 40, 33), classes=3, normalize=(0.4, 0.2))
    x = torch.rand(2, 3, 40, 33, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    out = (x - 0.4) / 0.2
    if name == "resnet50":
        out = norm(F.conv2d(out, model.conv1.weight, stride=2, padding=3), model.bn1).clamp(min=0)
        out = F.max_pool2d(out, 3, stride=2, padding=1)
    else:
        out = F.conv2d(out, model.conv1.weight, padding=1)
    for number, stride in enumerate(strides, start=1):
        for position, layer in enumerate(model.get_submodule(f"layer{number}")):
            out = block(out, layer, stride if position == 0 else 1)
    if name == "wide-resnet":
        out = norm(out, model.bn).clamp(min=0)
    last = model.fc if name == "resnet50" else model.linear
    torch.testing.assert_close(model(x), out.mean((2, 3)) @ last.weight.T + last.bias)
