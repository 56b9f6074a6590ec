"""Gradients of single examples, layer by layer: pure functions of a layer's input and its output's gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.kernels import conv_by_torch
from credo.core.kernels.common import Sums
from credo.core.kernels.conv_by_torch import ConvShape
from credo.core.kernels.conv_squares import conv_sums, shared_linear_sums


class Backward(Protocol):
    """From input, weight and output gradient to the input's gradient and, with a `scale` for the squares, the sums."""

    def __call__(
        self, x: Tensor, weight: Tensor, g: Tensor, *, needs_input: bool, bias: bool, scale: float | None
    ) -> tuple[Tensor | None, Sums | None]:
        """Gradient by the input if needed, sums (of the bias, too, if asked for) if there is a scale."""


@dataclass(frozen=True)
class Fused:
    """The layer's own computation with a way back that makes gradient and squares together, for less than each.

    `before` is what the layer does to its input first; without a `forward` the layer's own one is run. `suits` says
    whether it is possible for an input and weight.
    """

    backward: Backward
    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    before: Callable[[Tensor], Tensor] | None = None
    suits: Callable[[Tensor, Tensor], bool] = lambda x, weight: True


@dataclass(frozen=True)
class ExampleGradients:
    """How each example's weight and bias gradients follow from a layer's input and its output's gradient.

    Made from the layer when it runs: its mode may be another when the gradient comes. `dims`: dimensions of an input
    with its batch, at least. `features(x)` is what the output gradient g is multiplied by; it may need the whole batch,
    all else may be given some examples. `weight(features, g)` and `bias(g)` give each example's own gradient,
    `weight_squares` the sum of the weight's squares over examples, without keeping any; `both`, where it exists, that
    of weight and bias in one go, times a factor.
    """

    dims: int
    features: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor, Tensor], Tensor]
    weight_squares: Callable[[Tensor, Tensor], Tensor]
    bias: Callable[[Tensor], Tensor]
    fused: Fused | None = None
    both: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] | None = None


def widened(tensor: Tensor) -> Tensor:
    """At least single precision; indices stay what they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def full_precision(kind: str) -> AbstractContextManager[object]:
    """Without autocast on this kind of device, which would lower what was widened before."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _same(x: Tensor) -> Tensor:
    return x


def _sum_over(g: Tensor, start: int, stop: int) -> Tensor:
    return g.sum(tuple(range(start, stop))) if stop > start else g


def positions_behind(g: Tensor) -> Tensor:
    """Sum over all dimensions behind batch and channels."""
    return _sum_over(g, 2, g.dim())


def positions_before(g: Tensor, trailing: int) -> Tensor:
    """Sum over all dimensions between the batch and the last `trailing` ones."""
    return _sum_over(g, 1, g.dim() - trailing)


# -- linear: Σ over positions of (output gradient) × (input) ---------------------------------------------------------


def _linear_weight(a: Tensor, g: Tensor) -> Tensor:
    if a.dim() == 2:
        return g.unsqueeze(2) * a.unsqueeze(1)
    return torch.bmm(g.flatten(1, -2).transpose(1, 2), a.flatten(1, -2))


def _linear_weight_squares(a: Tensor, g: Tensor) -> Tensor:
    return _linear_squares(a, g, 1.0)[0]


def _linear_squares(a: Tensor, g: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """With one position, an example's gradient is an outer product, and the sum of its squares a matrix product."""
    if a.dim() > 2:
        sums = shared_linear_sums(a.flatten(1, -2), g.flatten(1, -2), bias=True, scale=scale)
        assert sums.bias_squares is not None
        return sums.squares, sums.bias_squares
    squared = g.square().mul_(scale)
    return torch.mm(squared.t(), a.square()), squared.sum(0)


def _linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # As F.linear, whose result is a view: out of an autograd function, nobody could change that in place.
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    flat, into = x.flatten(0, -2), out.flatten(0, -2)
    if bias is None:
        torch.mm(flat, weight.t(), out=into)
    else:
        torch.addmm(bias, flat, weight.t(), out=into)
    return out


def _linear_backward(
    x: Tensor, weight: Tensor, g: Tensor, *, needs_input: bool, bias: bool, scale: float | None
) -> tuple[Tensor | None, Sums | None]:
    dx = torch.matmul(g, weight.to(g.dtype)) if needs_input else None
    if scale is None:
        return dx, None
    return dx, shared_linear_sums(widened(x).flatten(1, -2), widened(g).flatten(1, -2), bias=bias, scale=scale)


_LINEAR = ExampleGradients(
    dims=2,
    features=_same,
    weight=_linear_weight,
    weight_squares=_linear_weight_squares,
    bias=partial(positions_before, trailing=1),
    # With one position there is nothing to share between gradient and squares.
    fused=Fused(_linear_backward, _linear_forward, suits=lambda x, weight: x.dim() > 2),
    both=_linear_squares,
)


def linear(layer: nn.Module) -> ExampleGradients:
    """Inputs of any rank with features last."""
    return _LINEAR


# -- convolutions ----------------------------------------------------------------------------------------------------


def conv(layer: nn.Module) -> ExampleGradients:
    """Convolutions of the input after what padding is not plain zeros on both sides."""
    module: Any = layer
    padding, before = conv_padding(layer)
    shape = ConvShape(module.kernel_size, module.stride, padding, module.dilation, module.groups)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return ExampleGradients(
        dims=2 + len(shape.kernel),
        features=_same,
        weight=partial(conv_by_torch.per_example, shape=shape),
        weight_squares=lambda a, g: conv_sums(a, g, shape).squares,
        bias=positions_behind,
        fused=Fused(
            partial(_conv_backward, shape),
            partial(_convolution, shape),
            partial(F.pad, pad=before, mode=mode) if before else None,
        ),
    )


def _convolution(shape: ConvShape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    none = [0] * len(shape.kernel)
    return torch.convolution(x, weight, bias, shape.stride, shape.padding, shape.dilation, False, none, shape.groups)


def _conv_backward(
    shape: ConvShape, x: Tensor, weight: Tensor, g: Tensor, *, needs_input: bool, bias: bool, scale: float | None
) -> tuple[Tensor | None, Sums | None]:
    dx = None
    if needs_input:
        none = [0] * len(shape.kernel)
        dx = torch.ops.aten.convolution_backward(
            g, x, weight.to(x.dtype), None, shape.stride, shape.padding, shape.dilation, False, none, shape.groups,
            [True, False, False],
        )[0]  # fmt: skip
    return dx, None if scale is None else conv_sums(widened(x), widened(g), shape, bias=bias, scale=scale)


def transposed_conv(layer: nn.Module) -> ExampleGradients:
    """The gradient of the convolution that it is the transpose of: input and output gradient change places."""
    plain = conv(layer)
    return ExampleGradients(
        dims=plain.dims,
        features=_same,
        weight=lambda a, g: plain.weight(g, a),
        weight_squares=lambda a, g: plain.weight_squares(g, a),
        bias=positions_behind,
    )


def conv_padding(layer: nn.Module) -> tuple[tuple[int, ...], list[int]]:
    """Zeros that the convolution itself adds on both sides of each dimension, and what `F.pad` must add before it."""
    module: Any = layer
    if module.padding_mode != "zeros":
        return (0,) * len(module.kernel_size), list(module._reversed_padding_repeated_twice)
    if module.padding == "valid":
        return (0,) * len(module.kernel_size), []
    if module.padding != "same":
        return tuple(module.padding), []
    # An odd number of zeros in all: torch puts the one too many at the end.
    totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    uneven = [side for total in reversed(totals) for side in (0, total % 2)]
    return tuple(total // 2 for total in totals), uneven if any(uneven) else []


# -- embedding: Σ over the places of a token in the example; none for the padding token ------------------------------


def embedding(layer: nn.Module) -> ExampleGradients:
    """Token lists of any rank, the batch in front."""
    module: Any = layer
    rows: int = module.num_embeddings
    sums = partial(_token_sums, rows=rows, padding=module.padding_idx)

    def weight(tokens: Tensor, g: Tensor) -> Tensor:
        places, found = sums(tokens, g)
        dense = found.new_zeros(tokens.shape[0] * rows, g.shape[-1])
        return dense.index_copy_(0, places, found).view(tokens.shape[0], rows, g.shape[-1])

    def squares(tokens: Tensor, g: Tensor) -> Tensor:
        places, found = sums(tokens, g)
        return found.new_zeros(rows, g.shape[-1]).index_add_(0, places % rows, found.square_())

    return ExampleGradients(1, _same, weight, squares, _same)


def _token_sums(tokens: Tensor, g: Tensor, *, rows: int, padding: int | None) -> tuple[Tensor, Tensor]:
    """Places (example · rows + token) that occur, and the gradients summed for each."""
    examples = torch.arange(tokens.shape[0], device=tokens.device).view(-1, *[1] * (tokens.dim() - 1))
    places = (examples * rows + tokens).flatten()
    each = g.reshape(-1, g.shape[-1])
    if padding is not None:
        kept = tokens.flatten() != padding
        places, each = places[kept], each[kept]
    found, index = places.unique(return_inverse=True)
    return found, each.new_zeros(len(found), each.shape[1]).index_add_(0, index, each)
