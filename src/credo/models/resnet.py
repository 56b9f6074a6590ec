"""Residual networks of basic blocks (He et al. 2016): the CIFAR family and ResNet-18."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from credo.core.errors import unknown
from credo.models.blocks import Layers, check_classes, image_shape, init_from, is_count, sequential
from credo.models.normalize import Stats, input_layer

IMAGENET_STATS: Stats = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Channel means and standard deviations of ImageNet, with which the public CIFAR ResNet weights were trained."""

_STEMS = {"cifar": (3, 1), "imagenet": (7, 2)}  # kernel and stride of the first convolution

Shortcut = Callable[[int, int, int], nn.Module]
"""Makes a block's shortcut from its input channels, output channels and stride."""


class PadShortcut(nn.Module):
    """Shortcut without parameters (option A): every `stride`-th pixel, and channels of zeros.

    Half of the zeros are before and half after the channels, which trained weights depend on.

    Args:
        channels_in: Channels of the input.
        channels_out: Channels of the output.
        stride: Spatial stride.
    """

    rowwise = True  # see credo.core.network.rowwise

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        extra = channels_out - channels_in
        self.stride = stride
        self.before, self.after = extra // 2, extra - extra // 2

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels_out, height / stride, width / stride]."""
        thinned = x[:, :, :: self.stride, :: self.stride]
        return F.pad(thinned, (0, 0, 0, 0, self.before, self.after))


def projection_shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    """Return a shortcut by a 1x1 convolution with BatchNorm (option B).

    Args:
        channels_in: Channels of the input.
        channels_out: Channels of the output.
        stride: Spatial stride.
    """
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
        nn.BatchNorm2d(channels_out),
    )


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions with BatchNorm.

    Args:
        channels_in: Channels of the input.
        channels_out: Channels of the output.
        stride: Spatial stride.
        shortcut: Makes the shortcut if the shapes differ.
    """

    rowwise = True  # see credo.core.network.rowwise

    def __init__(self, channels_in: int, channels_out: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same else shortcut(channels_in, channels_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels_out, height / stride, width / stride]."""
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(residual + self.shortcut(x))


def resnet_cifar(
    inputs: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    *,
    depth: int = 20,
    normalize: Stats | None = IMAGENET_STATS,
    seed: int | None = None,
) -> nn.Module:
    """The CIFAR ResNet of `depth` = 6n + 2 layers: widths 16, 32, 64 and shortcuts without parameters.

    Parameter names and normalisation are those of the public weights (see `load_cifar_resnet_weights`). The default
    normalisation is for colours: inputs with another number of channels are unchanged.

    Args:
        inputs: Shape of one example, (channels, height, width).
        classes: Number of outputs.
        depth: Number of layers, 6n + 2.
        normalize: (mean, std) of the inputs, per channel or one number each; None: inputs are unchanged.
        seed: Seed of the initial weights; None: torch's global generator.
    """
    if not is_count(depth) or depth < 8 or depth % 6 != 2:
        raise ValueError(f"depth must be 6n + 2 (8, 14, 20, 32, 44, 56, 110, ...), got {depth}.")
    if image_shape(f"resnet{depth}", inputs)[0] != 3 and _plain(normalize) == _plain(IMAGENET_STATS):
        normalize = None
    return _resnet(
        f"resnet{depth}",
        inputs,
        classes,
        widths=(16, 32, 64),
        blocks=(depth - 2) // 6,
        shortcut=PadShortcut,
        stem="cifar",
        normalize=normalize,
        seed=seed,
    )


def _plain(stats: Stats | None) -> list[list[float]]:
    """Return statistics as lists, which they become in a file; without single numbers for all channels."""
    return [list(values) for values in stats or () if isinstance(values, Sequence)]


def resnet18(
    inputs: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    *,
    stem: str = "cifar",
    normalize: Stats | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Build ResNet-18 with projection shortcuts.

    Args:
        inputs: Shape of one example, (channels, height, width).
        classes: Number of outputs.
        stem: "cifar": a 3x3 convolution at full resolution; "imagenet": a 7x7 one of stride 2 and max pooling, which
            leaves 8x8 positions of a 32x32 image.
        normalize: (mean, std) of the inputs, per channel or one number each; None: inputs are unchanged.
        seed: Seed of the initial weights; None: torch's global generator.
    """
    return _resnet(
        "resnet18",
        inputs,
        classes,
        widths=(64, 128, 256, 512),
        blocks=2,
        shortcut=projection_shortcut,
        stem=stem,
        normalize=normalize,
        seed=seed,
    )


def _resnet(
    name: str,
    inputs: Sequence[int],
    classes: int,
    *,
    widths: Sequence[int],
    blocks: int,
    shortcut: Shortcut,
    stem: str,
    normalize: Stats | None,
    seed: int | None,
) -> nn.Sequential:
    shape = image_shape(name, inputs)
    check_classes(classes)
    with init_from(seed):
        layers: Layers = {"normalize": input_layer(shape, normalize)}
        layers |= _stem(stem, shape[0], widths[0])
        channels = widths[0]
        for number, width in enumerate(widths, start=1):
            stride = 1 if number == 1 else 2
            layers[f"layer{number}"] = _stage(channels, width, stride, blocks, shortcut)
            channels = width
        layers |= {
            "pool": nn.AdaptiveAvgPool2d(1),
            "flatten": nn.Flatten(),
            "linear": nn.Linear(channels, classes),
        }
        net = sequential(layers)
        he_init_(net)
        return net


def _stem(kind: str, channels_in: int, width: int) -> Layers:
    if kind not in _STEMS:
        raise ValueError(unknown("stem", kind, _STEMS))
    kernel, stride = _STEMS[kind]
    conv = nn.Conv2d(channels_in, width, kernel, stride, padding=kernel // 2, bias=False)
    layers: Layers = {"conv1": conv, "bn1": nn.BatchNorm2d(width), "relu": nn.ReLU()}
    if kind == "imagenet":
        layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    return layers


def _stage(channels_in: int, width: int, stride: int, blocks: int, shortcut: Shortcut) -> nn.Sequential:
    first = BasicBlock(channels_in, width, stride, shortcut)
    return nn.Sequential(first, *(BasicBlock(width, width, 1, shortcut) for _ in range(blocks - 1)))


def he_init_(net: nn.Module) -> None:
    """Initialise convolutions as in He et al. (2015), by fan-out; the rest keeps torch's default."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
