"""Rules of layer types, keyed by exact type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.per_example import layer_rules as rules
from credo.core.per_example import norm_rules

Apply = Callable[[nn.Module, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class LayerRule:
    """How a layer type acts.

    Attributes:
        apply: `apply(layer, x, weight, bias)` is the layer's linear map with other weights.
        feature_dim: The dimension of an input's features.
        min_dim: Dimensions of an input with its batch, at least.
    """

    apply: Apply
    feature_dim: int
    min_dim: int


def _linear(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _conv(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The layer's own method handles stride, padding (also "same" and circular), dilation and groups.
    result: Tensor = layer._conv_forward(x, weight, bias)  # type: ignore[operator]
    return result


# Exact types only: a subclass may do anything in its forward (nn.MultiheadAttention never calls its out_proj).
RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: LayerRule(_linear, feature_dim=-1, min_dim=2),
    nn.Conv1d: LayerRule(_conv, feature_dim=-2, min_dim=3),
    nn.Conv2d: LayerRule(_conv, feature_dim=-3, min_dim=4),
    nn.Conv3d: LayerRule(_conv, feature_dim=-4, min_dim=5),
}


def output_variance(
    rule: LayerRule, layer: nn.Module, x: Tensor, weight_std: Tensor | None, bias_std: Tensor | None
) -> Tensor:
    """Variance of each output over independent Gaussian weights, given the input (Kingma et al. 2015).

    Exact for each output on its own; for convolutions, covariances between positions are left out.

    Args:
        rule: The rule of the layer's type.
        layer: The layer.
        x: Its input.
        weight_std: Standard deviations of the weight; None: it is not random.
        bias_std: The same for the bias.
    """
    bias_variance = None if bias_std is None else bias_std.square()
    if weight_std is not None:
        return rule.apply(layer, x.square(), weight_std.square(), bias_variance)
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return rule.apply(layer, torch.zeros_like(x), torch.zeros_like(weight), bias_variance)


def random_signs(shape: list[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """±1 with equal probability.

    Args:
        shape: Shape of the result.
        like: A tensor of its precision and device.
        generator: Source of the random numbers.
    """
    bits = torch.randint(0, 2, shape, generator=generator, device=like.device)
    return bits.to(like.dtype).mul_(2).sub_(1)


def sign_shapes(rule: LayerRule, x: Tensor, out: Tensor) -> tuple[list[int], list[int]]:
    """Shapes of one sign per example and input feature, and per example and output feature.

    Args:
        rule: The rule of the layer's type.
        x: The layer's input.
        out: Its output.
    """

    def shape(tensor: Tensor) -> list[int]:
        sizes = [1] * tensor.dim()
        sizes[0], sizes[rule.feature_dim] = tensor.shape[0], tensor.shape[rule.feature_dim]
        return sizes

    return shape(x), shape(out)


# How per-example gradients follow from a layer's input and its output's gradient.
EXAMPLE_GRADIENTS: dict[type[nn.Module], Callable[[nn.Module], rules.ExampleGradients]] = {
    nn.Linear: rules.linear,
    nn.Conv1d: rules.conv,
    nn.Conv2d: rules.conv,
    nn.Conv3d: rules.conv,
    nn.ConvTranspose1d: rules.transposed_conv,
    nn.ConvTranspose2d: rules.transposed_conv,
    nn.ConvTranspose3d: rules.transposed_conv,
    nn.Embedding: rules.embedding,
    **dict.fromkeys(norm_rules.NORMALISE, norm_rules.norm),
}
