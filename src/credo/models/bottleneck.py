"""ResNet-50: residual blocks with a bottleneck (He et al. 2016)."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from credo.models.blocks import Layers, check_classes, image_shape, init_from, is_count, sequential
from credo.models.normalize import Stats, input_layer
from credo.models.resnet import IMAGENET_STATS, he_init_

_BLOCKS = (3, 4, 6, 3)
_EXPANSION = 4


class Bottleneck(nn.Module):
    """Residual block of 1x1, 3x3 and 1x1 convolutions with BatchNorm.

    Args:
        channels_in: Channels of the input.
        width: Channels inside; the output has four times as many.
        stride: Stride of the 3x3 convolution.
    """

    rowwise = True  # see credo.core.network.rowwise

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = _EXPANSION * width
        self.conv1, self.bn1 = nn.Conv2d(channels_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, channels_out, 1, bias=False), nn.BatchNorm2d(channels_out)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels_out:
            projection = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 4·width, height / stride, width / stride]."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + (x if self.downsample is None else self.downsample(x)))


def resnet50(
    inputs: Sequence[int] = (3, 224, 224),
    classes: int = 1000,
    *,
    width: int = 64,
    normalize: Stats | None = IMAGENET_STATS,
    seed: int | None = None,
) -> nn.Module:
    """Build ResNet-50 for ImageNet, with strides in the 3x3 convolutions.

    Parameter names and normalisation are torchvision's, so that its weights fit (`load_named_weights`).

    Args:
        inputs: Shape of one example, (channels, height, width).
        classes: Number of outputs.
        width: Channels of the first stage.
        normalize: (mean, std) of the inputs, per channel or one number each; None: inputs are unchanged.
        seed: Seed of the initial weights; None: torch's global generator.
    """
    if not is_count(width):
        raise ValueError(f"width must be a positive whole number, got {width!r}.")
    shape = image_shape("resnet50", inputs)
    check_classes(classes)
    with init_from(seed):
        layers: Layers = {"normalize": input_layer(shape, normalize)}
        layers |= {
            "conv1": nn.Conv2d(shape[0], width, 7, 2, padding=3, bias=False),
            "bn1": nn.BatchNorm2d(width),
            "relu": nn.ReLU(),
            "maxpool": nn.MaxPool2d(3, stride=2, padding=1),
        }
        channels = width
        for number, count in enumerate(_BLOCKS, start=1):
            planes = width * 2 ** (number - 1)
            first = Bottleneck(channels, planes, 1 if number == 1 else 2)
            channels = _EXPANSION * planes
            layers[f"layer{number}"] = nn.Sequential(
                first, *(Bottleneck(channels, planes, 1) for _ in range(count - 1))
            )
        layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(channels, classes)}
        net = sequential(layers)
        he_init_(net)
        return net
