"""Networks without branches, written as a plan: convolutions and poolings, then fully connected layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce

from torch import nn

from credo.models.blocks import (
    Layers,
    activation_layer,
    check_sizes,
    dense_layers,
    image_shape,
    init_from,
    is_count,
    sequential,
)
from credo.models.normalize import Stats, input_layer


@dataclass(frozen=True)
class Window:
    """A square window that slides over the image."""

    kernel: int
    stride: int = 1
    padding: int = 0

    def outputs(self, side: int) -> int:
        """Positions along a side of that many pixels."""
        return (side + 2 * self.padding - self.kernel) // self.stride + 1

    def inputs(self, side: int) -> int:
        """The fewest pixels that give `side` positions."""
        return max(1, (side - 1) * self.stride + self.kernel - 2 * self.padding)


@dataclass(frozen=True)
class Conv:
    """A convolution with its activation (and BatchNorm before that, if the network has it)."""

    channels: int
    window: Window


@dataclass(frozen=True)
class Pool:
    """Max pooling."""

    window: Window


Plan = Sequence[Conv | Pool]


def smallest_side(plan: Plan) -> int:
    """The smallest image side for which every step of `plan` has an output."""
    return reduce(lambda side, step: step.window.inputs(side), reversed(plan), 1)


def plain_net(
    name: str,
    plan: Plan,
    *,
    inputs: Sequence[int],
    classes: int,
    hidden: Sequence[int] = (),
    activation: str = "relu",
    beta: float = 1.0,
    dropout: float = 0.0,
    dropout_layers: int = 1,
    batch_norm: bool = False,
    normalize: Stats | None = None,
    seed: int | None = None,
) -> nn.Sequential:
    """Normalize, the steps of `plan`, then fully connected layers `hidden` - `classes`.

    Initial weights are torch's own. Convolutions before BatchNorm have no bias, which it would only subtract. Dropout
    is on what all fully connected layers read; where there are fewer than `dropout_layers`, also on what the last
    convolutions read.
    """
    shape = image_shape(name, inputs, smallest_side(plan))
    check_sizes("hidden", hidden)
    make_activation = partial(activation_layer, activation, beta)
    convs = sum(isinstance(step, Conv) for step in plan)
    if not is_count(dropout_layers) or dropout_layers > convs + len(hidden):
        raise ValueError(f"dropout_layers={dropout_layers!r}: of {name} 1 to {convs + len(hidden)} layers can have it.")
    if dropout_layers > 1 and dropout == 0:
        raise ValueError(f"dropout_layers={dropout_layers} was given without dropout: give its rate, dropout=0.5, say.")
    first = convs + len(hidden) + 2 - dropout_layers  # of the convolutions that get dropout, counted from 1
    with init_from(seed):
        layers: Layers = {"normalize": input_layer(shape, normalize)}
        layers |= _feature_layers(plan, shape[0], make_activation, batch_norm, dropout, first)
        layers |= dense_layers(
            _feature_count(plan, shape),
            hidden,
            classes,
            activation=make_activation,
            dropout=dropout,
            drop_first=True,
        )
        return sequential(layers)


def _feature_layers(
    plan: Plan, channels: int, activation: Callable[[], nn.Module], batch_norm: bool, dropout: float, drop_from: int
) -> Layers:
    layers: Layers = {}
    number = 0
    for step in plan:
        kernel, stride, padding = step.window.kernel, step.window.stride, step.window.padding
        if isinstance(step, Pool):
            layers[f"pool{number}"] = nn.MaxPool2d(kernel, stride, padding)
            continue
        number += 1
        if dropout > 0 and number >= drop_from:
            layers[f"conv{number}_dropout"] = nn.Dropout(dropout)
        layers[f"conv{number}"] = nn.Conv2d(channels, step.channels, kernel, stride, padding, bias=not batch_norm)
        if batch_norm:
            layers[f"bn{number}"] = nn.BatchNorm2d(step.channels)
        layers[f"conv{number}_activation"] = activation()
        channels = step.channels
    return layers


def _feature_count(plan: Plan, shape: tuple[int, int, int]) -> int:
    channels, height, width = shape
    for step in plan:
        height, width = step.window.outputs(height), step.window.outputs(width)
        channels = step.channels if isinstance(step, Conv) else channels
    return channels * height * width
