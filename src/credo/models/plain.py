"""Networks without branches from a plan: convolutions and poolings, then fully connected layers."""

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
    """A square sliding window."""

    kernel: int
    stride: int = 1
    padding: int = 0

    def outputs(self, side: int) -> int:
        """Return the number of positions along a side of so many pixels."""
        return (side + 2 * self.padding - self.kernel) // self.stride + 1

    def inputs(self, side: int) -> int:
        """Return the fewest pixels that give `side` positions."""
        return max(1, (side - 1) * self.stride + self.kernel - 2 * self.padding)


@dataclass(frozen=True)
class Conv:
    """A convolution with activation (and BatchNorm before it, if the network has it)."""

    channels: int
    window: Window


@dataclass(frozen=True)
class Pool:
    """Max pooling."""

    window: Window


Plan = Sequence[Conv | Pool]


def smallest_side(plan: Plan) -> int:
    """Return the smallest image side for which every step of `plan` has an output."""
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
    """Build normalisation, the steps of `plan`, then fully connected layers `hidden` - `classes`.

    Initial weights are torch's default. Convolutions before BatchNorm have no bias, which it would subtract again.

    Args:
        name: Name of the model, for messages.
        plan: Convolutions and poolings in order.
        inputs: Shape of one example, (channels, height, width).
        classes: Number of outputs.
        hidden: Sizes of the hidden fully connected layers.
        activation: "relu", "tanh", "gelu" or "softplus".
        beta: Sharpness of softplus; only for it.
        dropout: Dropout rate before every fully connected layer.
        dropout_layers: If there are fewer fully connected layers, also before the last convolutions.
        batch_norm: BatchNorm after every convolution.
        normalize: (mean, std) of the inputs, per channel or one number each; None: inputs are unchanged.
        seed: Seed of the initial weights; None: torch's global generator.
    """
    shape = image_shape(name, inputs, smallest_side(plan))
    check_sizes("hidden", hidden)
    make_activation = partial(activation_layer, activation, beta)
    convs = sum(isinstance(step, Conv) for step in plan)
    if not is_count(dropout_layers) or dropout_layers > convs + len(hidden):
        raise ValueError(f"dropout_layers={dropout_layers!r}: {name} has 1 to {convs + len(hidden)} layers for it.")
    if dropout_layers > 1 and dropout == 0:
        raise ValueError(f"dropout_layers={dropout_layers} was given without dropout: give its rate, dropout=0.5.")
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
