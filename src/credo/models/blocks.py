"""Shared by several models: validation of options, activations, seeded weights, fully connected layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import nn

from credo.core.errors import unknown

Layers = dict[str, nn.Module]
"""Layers in order of use, by the name they get in the model."""

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


def activation_layer(name: str, beta: float = 1.0) -> nn.Module:
    """Return the activation of that name; `beta`, softplus' sharpness (towards ReLU as it grows), is for it only."""
    if name == "softplus":
        if not beta > 0:
            raise ValueError(f"beta must be positive, got {beta}.")
        return nn.Softplus(beta=beta)
    if name not in _ACTIVATIONS:
        raise ValueError(unknown("activation", str(name), [*_ACTIVATIONS, "softplus"]))
    if beta != 1.0:
        raise ValueError(f"beta={beta} was given with activation={name!r}; only softplus has a beta.")
    return _ACTIVATIONS[name]()


@contextmanager
def init_from(seed: int | None) -> Iterator[None]:
    """Seed the weights made inside the block, and restore the global generator afterwards.

    With a seed they are made on the CPU, so that they are equal on every device. None uses torch's global generator.
    """
    if seed is None:
        yield
        return
    # Not torch.manual_seed: it also reseeds every accelerator, which would not be restored.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def image_shape(model: str, inputs: Sequence[int], smallest: int = 1) -> tuple[int, int, int]:
    """Return `inputs` as (channels, height, width).

    Args:
        model: Name of the model, for the message.
        inputs: Shape of one example.
        smallest: Smallest valid height and width.

    Raises:
        ValueError: If it is not the shape of an image, or too small.
    """
    shape = example_shape(model, inputs)
    if len(shape) != 3:
        raise ValueError(f"{model} takes images: inputs must be (channels, height, width), got {shape}.")
    if min(shape[1:]) < smallest:
        raise ValueError(
            f"{model} needs images of at least {smallest}x{smallest} pixels, got {shape[1]}x{shape[2]}; "
            "use a model with less pooling (convnet, mlp) or enlarge the images."
        )
    return shape[0], shape[1], shape[2]


def example_shape(model: str, inputs: Sequence[int]) -> tuple[int, ...]:
    """Return `inputs` as a tuple; raise ValueError unless it is the shape of one example."""
    if not isinstance(inputs, Sequence) or not inputs or not all(is_count(size) for size in inputs):
        raise ValueError(f"{model}: inputs must be the shape of one example, like (1, 28, 28); got {inputs!r}.")
    return tuple(inputs)


def check_classes(classes: int) -> None:
    """Raise ValueError unless `classes` is a positive whole number."""
    if not is_count(classes):
        raise ValueError(f"classes must be a positive whole number, got {classes!r}.")


def check_sizes(option: str, sizes: Sequence[int]) -> None:
    """Raise ValueError unless `sizes` is a list of layer sizes; it may be empty."""
    if not isinstance(sizes, Sequence) or not all(is_count(size) for size in sizes):
        raise ValueError(f"{option} must be a list of layer sizes, like (16, 32); got {sizes!r}.")


def dense_layers(
    features: int,
    hidden: Sequence[int],
    classes: int,
    *,
    activation: Callable[[], nn.Module],
    dropout: float,
    drop_first: bool,
) -> Layers:
    """Return fully connected layers `features` - `hidden` - `classes` with dropout before each.

    Args:
        features: Number of inputs.
        hidden: Sizes of the hidden layers.
        classes: Number of outputs.
        activation: Makes the activation after a hidden layer.
        dropout: Dropout rate.
        drop_first: Whether there is dropout before the first layer; False if it reads the raw inputs.
    """
    check_sizes("hidden", hidden)
    check_classes(classes)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be a probability below 1, got {dropout}.")
    layers: Layers = {"flatten": nn.Flatten()}
    sizes = [features, *hidden, classes]
    for number, (size_in, size_out) in enumerate(pairwise(sizes), start=1):
        if dropout > 0 and (number > 1 or drop_first):
            layers[f"fc{number}_dropout"] = nn.Dropout(dropout)
        layers[f"fc{number}"] = nn.Linear(size_in, size_out)
        if number < len(sizes) - 1:
            layers[f"fc{number}_activation"] = activation()
    return layers


def sequential(layers: Layers) -> nn.Sequential:
    """Return the layers as nn.Sequential, under their names."""
    net = nn.Sequential()
    for name, layer in layers.items():
        net.add_module(name, layer)
    return net


def is_count(value: object) -> bool:
    """Return whether `value` is a positive whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
