"""The multilayer perceptron."""

from collections.abc import Sequence
from functools import partial
from math import prod

from torch import nn

from credo.models.blocks import Layers, activation_layer, dense_layers, example_shape, init_from, sequential
from credo.models.normalize import Normalize, Stats, input_layer


def mlp(
    inputs: Sequence[int] = (1, 28, 28),
    classes: int = 10,
    *,
    hidden: Sequence[int] = (100, 100),
    activation: str = "relu",
    beta: float = 1.0,
    dropout: float = 0.0,
    input_range: tuple[float, float] | None = None,
    normalize: Stats | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Build a multilayer perceptron on flattened inputs.

    Args:
        inputs: Shape of one example, of any dimension.
        classes: Number of outputs, also for regression.
        hidden: Sizes of the hidden layers.
        activation: "relu", "tanh", "gelu" or "softplus".
        beta: Sharpness of softplus; only for it.
        dropout: Dropout rate after the hidden layers.
        input_range: (low, high): map inputs from [0, 1] linearly to this range, instead of `normalize`.
        normalize: (mean, std) of the inputs, per channel or one number each; None: inputs are unchanged.
        seed: Seed of the initial weights; None: torch's global generator.
    """
    shape = example_shape("mlp", inputs)
    make_activation = partial(activation_layer, activation, beta)
    make_activation()  # raises on a wrong name even without hidden layers
    with init_from(seed):
        layers: Layers = {"normalize": _scaling(shape, input_range, normalize)}
        layers |= dense_layers(
            prod(shape),
            hidden,
            classes,
            activation=make_activation,
            dropout=dropout,
            drop_first=False,
        )
        return sequential(layers)


def _scaling(shape: tuple[int, ...], input_range: tuple[float, float] | None, normalize: Stats | None) -> Normalize:
    if input_range is None:
        return input_layer(shape, normalize)
    if normalize is not None:
        raise ValueError("mlp: both input_range and normalize scale the inputs; give one of them.")
    if not isinstance(input_range, Sequence) or len(input_range) != 2:
        raise ValueError(f"mlp: input_range must be a pair (low, high), got {input_range!r}.")
    return Normalize.to_range(*input_range)
