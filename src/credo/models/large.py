"""AlexNet and VGG16 for ImageNet, and VGG16 with small linear layers for CIFAR."""

from collections.abc import Sequence

from torch import nn

from credo.models.blocks import init_from
from credo.models.normalize import Stats
from credo.models.plain import Conv, Plan, Pool, Window, plain_net
from credo.models.resnet import he_init_

_HALVE = Pool(Window(2, stride=2))
_OVERLAP = Pool(Window(3, stride=2))


def alexnet_imagenet(
    inputs: Sequence[int] = (3, 224, 224),
    classes: int = 1000,
    *,
    hidden: Sequence[int] = (4096, 4096),
    dropout: float = 0.0,
    normalize: Stats | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Build AlexNet with 61 million weights for 224x224 images (Krizhevsky 2014).

    Args:
        inputs: Shape of one example, (channels, height, width).
        classes: Number of outputs.
        hidden: Sizes of the hidden fully connected layers.
        dropout: Dropout rate before every fully connected layer.
        normalize: (mean, std) of the inputs, per channel or one number each; None: inputs are unchanged.
        seed: Seed of the initial weights; None: torch's global generator.
    """
    plan: Plan = (
        Conv(64, Window(11, stride=4, padding=2)),
        _OVERLAP,
        Conv(192, Window(5, padding=2)),
        _OVERLAP,
        *(Conv(count, Window(3, padding=1)) for count in (384, 256, 256)),
        _OVERLAP,
    )
    return plain_net(
        "alexnet-imagenet",
        plan,
        inputs=inputs,
        classes=classes,
        hidden=hidden,
        dropout=dropout,
        normalize=normalize,
        seed=seed,
    )


def vgg16_large(
    inputs: Sequence[int] = (3, 224, 224),
    classes: int = 1000,
    *,
    hidden: Sequence[int] = (4096, 4096),
    dropout: float = 0.0,
    normalize: Stats | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Build VGG16 with 138 million weights for 224x224 images (Simonyan and Zisserman 2015), without BatchNorm.

    Args:
        inputs: Shape of one example, (channels, height, width).
        classes: Number of outputs.
        hidden: Sizes of the hidden fully connected layers.
        dropout: Dropout rate before every fully connected layer.
        normalize: (mean, std) of the inputs, per channel or one number each; None: inputs are unchanged.
        seed: Seed of the initial weights; None: torch's global generator.
    """
    return _vgg16("vgg16-large", inputs, classes, hidden, dropout, normalize, seed)


def vgg16_small(
    inputs: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    *,
    hidden: Sequence[int] = (512, 512),
    dropout: float = 0.0,
    normalize: Stats | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Build VGG16 for 32x32 images, with linear layers of 512 units and without BatchNorm (Trinh et al. 2020).

    Args:
        inputs: Shape of one example, (channels, height, width).
        classes: Number of outputs.
        hidden: Sizes of the hidden fully connected layers.
        dropout: Dropout rate before every fully connected layer.
        normalize: (mean, std) of the inputs, per channel or one number each; None: inputs are unchanged.
        seed: Seed of the initial weights; None: torch's global generator.
    """
    return _vgg16("vgg16-small", inputs, classes, hidden, dropout, normalize, seed)


def _vgg16(
    name: str,
    inputs: Sequence[int],
    classes: int,
    hidden: Sequence[int],
    dropout: float,
    normalize: Stats | None,
    seed: int | None,
) -> nn.Module:
    plan: list[Conv | Pool] = []
    for count, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        plan += [Conv(count, Window(3, padding=1))] * repeats
        plan.append(_HALVE)
    with init_from(seed):
        net = plain_net(name, plan, inputs=inputs, classes=classes, hidden=hidden, dropout=dropout, normalize=normalize)
        he_init_(net)  # without BatchNorm it hardly learns from torch's default initial values
        return net
