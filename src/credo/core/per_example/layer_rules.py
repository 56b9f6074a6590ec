"""Per-example gradients, layer by layer: pure functions of a layer's input and its output's gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
    """The backward pass of a layer that also sums squared per-example gradients."""

    def __call__(
        self, x: Tensor, weight: Tensor, g: Tensor, *, needs_input: bool, bias: bool, scale: float | None
    ) -> tuple[Tensor | None, Sums | None]:
        """The gradient by the input, and the sums over examples.

        Args:
            x: The layer's input.
            weight: Its weight.
            g: The gradient by its output.
            needs_input: Whether the gradient by the input is wanted.
            bias: Whether the sums of the bias are wanted, too.
            scale: Factor of the squares; None: no sums are wanted.
        """


@dataclass(frozen=True)
class Fused:
    """The layer's own computation with a backward that makes gradient and squares together, for less than each.

    Attributes:
        backward: That backward.
        forward: The computation from input, weight and bias; None: the layer's own one.
        before: What the layer does to its input first, if anything.
        dims: Dimensions that the input has at least.
        suits: Whether it is possible for an input and weight; None: always.
    """

    backward: Backward
    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    before: Callable[[Tensor], Tensor] | None = None
    dims: int = 0
    suits: Callable[[Tensor, Tensor], bool] | None = None


@dataclass(frozen=True)
class ExampleGradients:
    """How per-example gradients of weight and bias follow from a layer's input and its output's gradient g.

    Made from the layer when it runs: its mode may be another when the gradient arrives.

    Attributes:
        dims: Dimensions of an input with its batch, at least.
        features: From the input to what g is multiplied by; may need the whole batch, all else works on part of it.
        weight: Each example's weight gradient, from features and g.
        weight_squares: Σ over examples of its squares, without keeping any of them.
        bias: Each example's bias gradient, from g.
        fused: A backward pass that makes gradient and squares together, where one exists.
        both: Squares of weight and bias in one go, times a factor, where that is cheaper.
        is_outer: Where g is [batch, out], an example's weight gradient is the outer product of g and its features, and
            its bias gradient is g.
    """

    dims: int
    features: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor, Tensor], Tensor]
    weight_squares: Callable[[Tensor, Tensor], Tensor]
    bias: Callable[[Tensor], Tensor]
    fused: Fused | None = None
    both: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] | None = None
    is_outer: bool = False

    def squares(self, keys: Collection[str], x: Tensor | None, g: Tensor, scale: float) -> dict[str, Tensor]:
        """Σ over examples of squared gradients times `scale`.

        Args:
            keys: Those of `"weight"` and `"bias"` that are wanted; of others there may be some, too.
            x: The layer's input, which the weight needs.
            g: The gradient by its output, in single precision or wider.
            scale: A factor.
        """
        with full_precision(g.device.type):
            if x is not None and self.both is not None:
                return dict(zip(("weight", "bias"), self.both(widened(x), g, scale), strict=True))
            found: dict[str, Tensor] = {}
            if "weight" in keys and x is not None:
                found["weight"] = self.weight_squares(self.features(widened(x)), g).mul_(scale)
            if "bias" in keys:
                found["bias"] = self.bias(g).square().sum(0).mul_(scale)
            return found

    def examples(self, key: str, x: Tensor | None, g: Tensor) -> Callable[[slice], Tensor]:
        """A function that gives the gradients of some of the examples, [examples, *shape].

        Args:
            key: `"weight"` or `"bias"`.
            x: The layer's input, which the weight needs.
            g: The gradient by its output, in single precision or wider.
        """
        with full_precision(g.device.type):
            if key == "bias":
                return self.bias(g).__getitem__
            assert x is not None
            features = self.features(widened(x))
        return lambda part: self.weight(features[part], g[part])


def widened(tensor: Tensor) -> Tensor:
    """The tensor in single precision, if it is in half precision; else as it is (indices, too)."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


# -- the backward pass -------------------------------------------------------------------------------------------------


def computes_gradient_of(weight: Tensor) -> bool:
    """Whether the running backward pass computes gradients by the weight; an attack's, inside a loss, does not."""
    with torch.enable_grad():
        node: Any = weight.view_as(weight).grad_fn
    try:
        return bool(torch._C._will_engine_execute_node(node.next_functions[0][0]))
    except RuntimeError:  # torch.autograd.grad by this very weight
        return True


def full_precision(kind: str) -> AbstractContextManager[object]:
    """Without autocast on this kind of device, which would lower what was widened before."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def check_first_order() -> None:
    """Raise RuntimeError inside a backward pass that shall be differentiated itself."""
    if torch.is_grad_enabled():
        raise RuntimeError("Inside squared_gradients a gradient cannot be differentiated again (create_graph=True).")


class Receiver(Protocol):
    """What takes the sums of a fused backward pass."""

    def expected(self) -> bool:
        """Whether the backward pass that is running computes gradients by the weights."""

    def take(self, x: Tensor, g: Tensor, sums: Sums) -> None:
        """Take the sums, with the layer's input x and the gradient g by its output."""


def fused_forward(
    receiver: Receiver, fused: Fused, x: Tensor, own: Mapping[str, Any], plain: Callable[..., Any]
) -> Tensor:
    """The layer's output; its backward pass makes gradient and squares together.

    Args:
        receiver: Takes the sums when the gradient arrives.
        fused: The computation.
        x: The layer's input.
        own: Its parameters.
        plain: Its own forward.
    """
    if fused.before is not None:
        x = fused.before(x)
    kind = x.device.type
    lowered = fused.forward is not None and torch.is_autocast_enabled(kind) and x.dtype is not torch.float64
    if lowered:
        x = x.to(torch.get_autocast_dtype(kind))
    with full_precision(kind) if lowered else nullcontext():
        run: Any = _FusedLayer.apply
        out: Tensor = run(receiver, fused, plain, lowered, x, own["weight"], own.get("bias"))
    return out


class _FusedLayer(torch.autograd.Function):
    """A layer whose backward makes Σ g and Σ g² of its weight together, instead of the library's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        receiver: Receiver,
        fused: Fused,
        plain: Callable[..., Any],
        lowered: bool,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """As `fused_forward`: ctx is autograd's; receiver, fused, plain; whether it is lowered; x, weight and bias."""
        ctx.receiver, ctx.fused = receiver, fused
        ctx.save_for_backward(x, weight)
        if fused.forward is None:
            return plain(x)  # type: ignore[no-any-return]
        if lowered:
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return fused.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order()
        receiver, (x, weight), needs = ctx.receiver, ctx.saved_tensors, ctx.needs_input_grad
        scale = float(g.shape[0] ** 2) if receiver.expected() else None
        with full_precision(g.device.type):
            dx, sums = ctx.fused.backward(x, weight, g, needs_input=needs[4], bias=needs[6], scale=scale)
            if scale is None or sums is None:
                return None, None, None, None, dx, None, None
            receiver.take(x, g, sums)
        bias = sums.bias_total.to(weight.dtype) if needs[6] and sums.bias_total is not None else None
        return None, None, None, None, dx, sums.total.to(weight.dtype), bias


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
    """Of several positions; with one, `square_rows` has them."""
    sums = shared_linear_sums(a.flatten(1, -2), g.flatten(1, -2), bias=True, scale=scale)
    assert sums.bias_squares is not None
    return sums.squares, sums.bias_squares


def _linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # As F.linear, whose result is a view: coming out of an autograd function, it could not be changed in place.
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
    fused=Fused(_linear_backward, _linear_forward, dims=3),
    both=_linear_squares,
    is_outer=True,
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
    """Zeros that the convolution adds on both sides of each dimension, and what `F.pad` must add before it."""
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


# -- embedding: Σ over the positions of a token in the example; none for the padding token ---------------------------


def embedding(layer: nn.Module) -> ExampleGradients:
    """Token lists of any rank, the batch in front."""
    module: Any = layer
    rows: int = module.num_embeddings
    sums = partial(_token_sums, rows=rows, padding=module.padding_idx)

    def weight(tokens: Tensor, g: Tensor) -> Tensor:
        indices, found = sums(tokens, g)
        dense = found.new_zeros(tokens.shape[0] * rows, g.shape[-1])
        return dense.index_copy_(0, indices, found).view(tokens.shape[0], rows, g.shape[-1])

    def squares(tokens: Tensor, g: Tensor) -> Tensor:
        indices, found = sums(tokens, g)
        return found.new_zeros(rows, g.shape[-1]).index_add_(0, indices % rows, found.square_())

    return ExampleGradients(1, _same, weight, squares, _same)


def _token_sums(tokens: Tensor, g: Tensor, *, rows: int, padding: int | None) -> tuple[Tensor, Tensor]:
    """Indices (example · rows + token) that occur, and the gradients summed for each."""
    examples = torch.arange(tokens.shape[0], device=tokens.device).view(-1, *[1] * (tokens.dim() - 1))
    indices = (examples * rows + tokens).flatten()
    each = g.reshape(-1, g.shape[-1])
    if padding is not None:
        kept = tokens.flatten() != padding
        indices, each = indices[kept], each[kept]
    found, index = indices.unique(return_inverse=True)
    return found, each.new_zeros(len(found), each.shape[1]).index_add_(0, index, each)
