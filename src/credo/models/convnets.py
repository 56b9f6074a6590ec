"""Convolutional networks without branches: LeNet-5, a small one for digits, AlexNet, 3Conv3FC and VGG16.

Each is defined by its source for one image size; other sizes work if every pooling has an output, with another number
of features before the first fully connected layer.
"""

from collections.abc import Sequence

from torch import nn

from credo.core.errors import unknown
from credo.models.blocks import check_sizes, image_shape
from credo.models.normalize import Stats
from credo.models.plain import Conv, Plan, Pool, Window, plain_net

_HALVE = Pool(Window(2, stride=2))


def lenet5(
    inputs: Sequence[int] = (1, 28, 28),
    classes: int = 10,
    *,
    activation: str = "relu",
    beta: float = 1.0,
    dropout: float = 0.0,
    normalize: Stats | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Build LeNet-5 (LeCun et al. 1998) with max pooling and one output per class.

    28x28 images are padded to 32x32 by the first convolution, so both sizes have the same 400-120-84 layers.

    Args:
        inputs: Shape of one example, (channels, height, width).
        classes: Number of outputs.
        activation: "relu", "tanh", "gelu" or "softplus".
        beta: Sharpness of softplus; only for it.
        dropout: Dropout rate before every fully connected layer.
        normalize: (mean, std) of the inputs, per channel or one number each; None: inputs are unchanged.
        seed: Seed of the initial weights; None: torch's global generator.
    """
    padding = 2 if image_shape("lenet5", inputs)[1:] == (28, 28) else 0
    plan = (Conv(6, Window(5, padding=padding)), _HALVE, Conv(16, Window(5)), _HALVE)
    return plain_net(
        "lenet5",
        plan,
        inputs=inputs,
        classes=classes,
        hidden=(120, 84),
        activation=activation,
        beta=beta,
        dropout=dropout,
        normalize=normalize,
        seed=seed,
    )


def convnet(
    inputs: Sequence[int] = (1, 8, 8),
    classes: int = 10,
    *,
    channels: Sequence[int] = (16, 32),
    hidden: Sequence[int] = (64,),
    activation: str = "relu",
    beta: float = 1.0,
    dropout: float = 0.0,
    batch_norm: bool = False,
    normalize: Stats | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Build a network of 3x3 convolutions, one pooling and hidden layers, for images as small as 8x8 digits.

    Args:
        inputs: Shape of one example, (channels, height, width).
        classes: Number of outputs.
        channels: Channels of the convolutions.
        hidden: Sizes of the hidden fully connected layers.
        activation: "relu", "tanh", "gelu" or "softplus".
        beta: Sharpness of softplus; only for it.
        dropout: Dropout rate before every fully connected layer.
        batch_norm: BatchNorm after every convolution.
        normalize: (mean, std) of the inputs, per channel or one number each; None: inputs are unchanged.
        seed: Seed of the initial weights; None: torch's global generator.
    """
    check_sizes("channels", channels)
    plan: Plan = (*(Conv(count, Window(3, padding=1)) for count in channels), _HALVE)
    return plain_net(
        "convnet",
        plan,
        inputs=inputs,
        classes=classes,
        hidden=hidden,
        activation=activation,
        beta=beta,
        dropout=dropout,
        batch_norm=batch_norm,
        normalize=normalize,
        seed=seed,
    )


def alexnet(
    inputs: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    *,
    width: float = 1.0,
    variant: str = "bbb",
    activation: str = "relu",
    beta: float = 1.0,
    dropout: float = 0.0,
    dropout_layers: int = 1,
    normalize: Stats | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Build AlexNet for 32x32 images: five convolutions and a single linear layer.

    28x28 images are padded to 32x32 by the first convolution.

    Args:
        inputs: Shape of one example, (channels, height, width).
        classes: Number of outputs.
        width: Factor on all channel counts.
        variant: "bbb" ends with 128 channels (Shridhar et al. 2019), "vogn" with 256 (Osawa et al. 2019).
        activation: "relu", "tanh", "gelu" or "softplus".
        beta: Sharpness of softplus; only for it.
        dropout: Dropout rate before the last `dropout_layers` layers.
        dropout_layers: 1 is the linear layer only; more add convolutions.
        normalize: (mean, std) of the inputs, per channel or one number each; None: inputs are unchanged.
        seed: Seed of the initial weights; None: torch's global generator.
    """
    last = {"bbb": 128, "vogn": 256}
    if variant not in last:
        raise ValueError(unknown("variant", variant, last))
    if not width > 0:
        raise ValueError(f"width must be positive, got {width}.")
    counts = [max(1, round(count * width)) for count in (64, 192, 384, 256, last[variant])]
    padding = 7 if image_shape("alexnet", inputs)[1:] == (28, 28) else 5
    plan: Plan = (
        Conv(counts[0], Window(11, stride=4, padding=padding)),
        _HALVE,
        Conv(counts[1], Window(5, padding=2)),
        _HALVE,
        *(Conv(count, Window(3, padding=1)) for count in counts[2:]),
        _HALVE,
    )
    return plain_net(
        "alexnet",
        plan,
        inputs=inputs,
        classes=classes,
        activation=activation,
        beta=beta,
        dropout=dropout,
        dropout_layers=dropout_layers,
        normalize=normalize,
        seed=seed,
    )


def three_conv_three_fc(
    inputs: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    *,
    activation: str = "relu",
    beta: float = 1.0,
    dropout: float = 0.0,
    normalize: Stats | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Build 3Conv3FC (Shridhar et al. 2019): 5x5 convolutions with overlapping pooling, then 512-1000-1000.

    Args:
        inputs: Shape of one example, (channels, height, width).
        classes: Number of outputs.
        activation: "relu", "tanh", "gelu" or "softplus".
        beta: Sharpness of softplus; only for it.
        dropout: Dropout rate before every fully connected layer.
        normalize: (mean, std) of the inputs, per channel or one number each; None: inputs are unchanged.
        seed: Seed of the initial weights; None: torch's global generator.
    """
    pool = Pool(Window(3, stride=2))
    plan = (
        Conv(32, Window(5, padding=2)),
        pool,
        Conv(64, Window(5, padding=2)),
        pool,
        Conv(128, Window(5, padding=1)),
        pool,
    )
    return plain_net(
        "3conv3fc",
        plan,
        inputs=inputs,
        classes=classes,
        hidden=(1000, 1000),
        activation=activation,
        beta=beta,
        dropout=dropout,
        normalize=normalize,
        seed=seed,
    )


def vgg16_bn(
    inputs: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    *,
    dropout: float = 0.0,
    normalize: Stats | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Build the 13 convolutions of VGG16 (Simonyan and Zisserman 2015) with BatchNorm and a single linear layer.

    Args:
        inputs: Shape of one example, (channels, height, width).
        classes: Number of outputs.
        dropout: Dropout rate before the linear layer.
        normalize: (mean, std) of the inputs, per channel or one number each; None: inputs are unchanged.
        seed: Seed of the initial weights; None: torch's global generator.
    """
    plan: list[Conv | Pool] = []
    for count, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        plan += [Conv(count, Window(3, padding=1))] * repeats
        plan.append(_HALVE)
    return plain_net(
        "vgg16-bn",
        plan,
        inputs=inputs,
        classes=classes,
        dropout=dropout,
        batch_norm=True,
        normalize=normalize,
        seed=seed,
    )
