"""Convolutional networks without branches: LeNet-5, a small one for digits, AlexNet, 3Conv3FC and VGG16.

Each is defined by its sources for one image size; others work as long as every pooling has something to pool,
with more features before the first fully connected layer. Dropout acts on what every fully connected layer
reads, in AlexNet also on what the last convolutions read, if asked for.
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
    """LeNet-5 (LeCun et al. 1998) with max pooling and one output per class.

    28x28 images are padded to 32x32 by the first convolution, so both sizes have the same 400-120-84 layers.
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
    """3x3 convolutions, one pooling and a hidden layer: for images as small as scikit-learn's 8x8 digits."""
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
    """AlexNet for 32x32 images: five convolutions and a single linear layer.

    `variant="bbb"` ends with 128 channels (Shridhar et al. 2019), `"vogn"` with 256 (Osawa et al. 2019).
    `width` multiplies all channel counts. Dropout is on what the last `dropout_layers` layers read. 28x28 images are
    padded to 32x32 by the first convolution.
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
    """3Conv3FC (Shridhar et al. 2019): 5x5 convolutions with overlapping pooling, then 512-1000-1000."""
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
    """The 13 convolutions of VGG16 (Simonyan and Zisserman 2015) with BatchNorm and a single linear layer."""
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
