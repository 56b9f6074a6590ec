"""Wide residual networks (Zagoruyko and Komodakis 2016)."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from credo.models.blocks import Layers, check_classes, image_shape, init_from, is_count, sequential
from credo.models.normalize import Stats, input_layer
from credo.models.resnet import he_init_


class WideBlock(nn.Module):
    """Residual block of twice BatchNorm, ReLU and a 3x3 convolution.

    Args:
        channels_in: Channels of the input.
        channels_out: Channels of the output.
        stride: Stride of the first convolution.
        dropout: Dropout rate between the convolutions.
    """

    rowwise = True  # see credo.core.network.rowwise

    def __init__(self, channels_in: int, channels_out: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        same = stride == 1 and channels_in == channels_out
        self.shortcut = None if same else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels_out, height / stride, width / stride]."""
        active = F.relu(self.bn1(x))
        out: Tensor = self.conv2(self.dropout(F.relu(self.bn2(self.conv1(active)))))
        return out + (x if self.shortcut is None else self.shortcut(active))


def wide_resnet(
    inputs: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    *,
    depth: int = 28,
    widen: int = 10,
    dropout: float = 0.0,
    normalize: Stats | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Build a wide ResNet with widths 16, 32, 64 times `widen`, for CIFAR.

    Args:
        inputs: Shape of one example, (channels, height, width).
        classes: Number of outputs.
        depth: Number of layers, 6n + 4.
        widen: Factor on the widths.
        dropout: Dropout rate inside the blocks.
        normalize: (mean, std) of the inputs, per channel or one number each; None: inputs are unchanged.
        seed: Seed of the initial weights; None: torch's global generator.
    """
    if not is_count(depth) or depth < 10 or depth % 6 != 4:
        raise ValueError(f"depth must be 6n + 4 (10, 16, 22, 28, 40, ...), got {depth}.")
    if not is_count(widen):
        raise ValueError(f"widen must be a positive whole number, got {widen!r}.")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be a probability below 1, got {dropout}.")
    shape = image_shape("wide-resnet", inputs)
    check_classes(classes)
    with init_from(seed):
        layers: Layers = {"normalize": input_layer(shape, normalize)}
        layers["conv1"] = nn.Conv2d(shape[0], 16, 3, padding=1, bias=False)
        channels = 16
        for number, width in enumerate((16 * widen, 32 * widen, 64 * widen), start=1):
            blocks = [WideBlock(channels, width, 1 if number == 1 else 2, dropout)]
            blocks += [WideBlock(width, width, 1, dropout) for _ in range((depth - 4) // 6 - 1)]
            layers[f"layer{number}"] = nn.Sequential(*blocks)
            channels = width
        layers |= {"bn": nn.BatchNorm2d(channels), "relu": nn.ReLU(), "pool": nn.AdaptiveAvgPool2d(1)}
        layers |= {"flatten": nn.Flatten(), "linear": nn.Linear(channels, classes)}
        net = sequential(layers)
        he_init_(net)
        return net
