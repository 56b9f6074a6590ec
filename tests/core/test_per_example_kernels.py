"""The compiled sums of convolutions and norms against torch, in both of their ways and precisions."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.kernels import conv_by_torch
from credo.core.kernels.build import library
from credo.core.kernels.conv_by_torch import ConvShape
from credo.core.kernels.conv_squares import conv_sums, shared_linear_sums
from credo.core.kernels.norm_squares import norm_back, usable

compiled = pytest.mark.skipif(library("conv_squares") is None, reason="no compiler")

# (batch, channels, outputs, sizes, kernel, stride, padding, dilation, groups)
CASES = {
    "few weights, many positions": (3, 5, 7, (19, 21), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "few channels": (4, 1, 3, (9, 9), (5, 5), (1, 1), (2, 2), (1, 1), 1),
    "more channels than a vector": (2, 37, 21, (9, 5), (3, 2), (2, 1), (1, 0), (1, 1), 1),
    "dilated": (2, 6, 9, (12, 13), (3, 3), (1, 2), (2, 3), (2, 3), 1),
    "groups": (3, 12, 20, (7, 6), (3, 3), (1, 1), (1, 1), (1, 1), 4),
    "many weights, few positions": (5, 160, 161, (4, 4), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "many weights, two positions": (37, 130, 170, (2, 1), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "many weights, some positions": (3, 131, 170, (6, 7), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "many weights and positions": (2, 150, 150, (20, 20), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "many weights in groups": (3, 320, 322, (4, 3), (3, 3), (1, 1), (1, 1), (1, 1), 2),
    "one dimension": (3, 6, 8, (50,), (7,), (3,), (2,), (1,), 2),
    "three dimensions": (2, 5, 6, (5, 6, 7), (2, 3, 3), (1, 2, 1), (0, 1, 1), (2, 1, 1), 1),
}


def tensors(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, ConvShape]:
    batch, channels, outputs, sizes, kernel, stride, padding, dilation, groups = CASES[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, channels, *sizes, generator=generator, dtype=dtype)
    out = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(sizes, padding, dilation, kernel, stride, strict=True)
    ]
    g = torch.randn(batch, outputs, *out, generator=generator, dtype=dtype)
    return x, g, ConvShape(kernel, stride, padding, dilation, groups)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("threads", [1, 3])
def test_convolution(name: str, dtype: torch.dtype, threads: int) -> None:
    x, g, shape = tensors(name, dtype)
    each = conv_by_torch.per_example(x.double(), g.double(), shape)
    biases = g.double().flatten(2).sum(2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = conv_sums(x, g, shape, bias=True, scale=4.0)
        again = conv_sums(x, g, shape, bias=True, scale=4.0)
    finally:
        torch.set_num_threads(before)
    pairs = {
        "total": each.sum(0),
        "squares": 4 * each.square().sum(0),
        "bias_total": biases.sum(0),
        "bias_squares": 4 * biases.square().sum(0),
    }
    for key, wanted in pairs.items():
        value = getattr(found, key)
        assert value.dtype is dtype
        tolerance = (1e-5 if dtype is torch.float32 else 1e-13) * wanted.abs().max().item()
        assert (value - wanted).abs().max().item() < tolerance, key
        assert torch.equal(value, getattr(again, key))


@pytest.mark.parametrize("name", CASES)
def test_the_torch_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDO_KERNELS", "0")
    x, g, shape = tensors(name, torch.float64)
    each = conv_by_torch.per_example(x, g, shape)
    found = conv_sums(x, g, shape, scale=2.0)
    torch.testing.assert_close(found.total, each.sum(0))
    torch.testing.assert_close(found.squares, 2 * each.square().sum(0))
    module = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(shape.kernel)]
    weight = torch.zeros(each.shape[1:], dtype=torch.float64, requires_grad=True)
    module(x, weight, None, shape.stride, shape.padding, shape.dilation, shape.groups).backward(g)
    torch.testing.assert_close(found.total, weight.grad)


@compiled
@pytest.mark.parametrize("name", ["few weights, many positions", "more channels than a vector", "groups"])
def test_any_layout_in_memory(name: str) -> None:
    x, g, shape = tensors(name, torch.float64)
    wanted = conv_sums(x, g, shape, bias=True)
    padded = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=torch.float64)
    padded[..., ::2] = x
    for a in (x, x.to(memory_format=torch.channels_last), padded[..., ::2]):
        for b in (g, g.to(memory_format=torch.channels_last), g.mT.contiguous().mT):
            found = conv_sums(a, b, shape, bias=True)
            torch.testing.assert_close(found.squares, wanted.squares)
            torch.testing.assert_close(found.total, wanted.total)
            torch.testing.assert_close(found.bias_squares, wanted.bias_squares)


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("positions", [2, 5, 30])
def test_shared_linear_maps(kernels: str, positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDO_KERNELS", kernels)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, positions, 19, generator=generator, dtype=torch.float64)
    g = torch.randn(4, positions, 13, generator=generator, dtype=torch.float64)
    each = torch.einsum("npo,npi->noi", g, x)
    found = shared_linear_sums(x, g, bias=True, scale=3.0)
    torch.testing.assert_close(found.total, each.sum(0))
    torch.testing.assert_close(found.squares, 3 * each.square().sum(0))
    torch.testing.assert_close(found.bias_total, g.sum((0, 1)))
    torch.testing.assert_close(found.bias_squares, 3 * g.sum(1).square().sum(0))


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("positions", [8, 64, 77])
def test_batch_norm(dtype: torch.dtype, training: bool, positions: int) -> None:
    """Also with a mean far from zero, which naive sums of squares would not survive in single precision."""
    generator = torch.Generator().manual_seed(0)
    x = 100 + torch.randn(6, 5, positions, generator=generator, dtype=torch.float64)
    g = torch.randn(6, 5, positions, generator=generator, dtype=torch.float64)
    layer = nn.BatchNorm1d(5, dtype=torch.float64).train(training)
    layer.running_mean.fill_(99)
    nn.init.normal_(layer.weight)
    statistics = None if training else (layer.running_mean.clone(), layer.running_var.clone())
    inputs = x.to(dtype).double().requires_grad_()
    g = g.to(dtype).double()
    layer(inputs).backward(g)
    with torch.no_grad():
        hidden = F.batch_norm(inputs, *(statistics or (None, None)), training=training)
    assert usable(x.to(dtype), layer.weight.to(dtype))
    weight = layer.weight.detach().to(dtype)
    dx, sums = norm_back(x.to(dtype), g.to(dtype), weight, statistics, layer.eps, needs_input=True, scale=2.0)
    wanted = {
        "total": layer.weight.grad,
        "bias_total": layer.bias.grad,
        "squares": 2 * (g * hidden).sum(2).square().sum(0),
        "bias_squares": 2 * g.sum(2).square().sum(0),
    }
    tolerance = 1e-4 if dtype is torch.float32 else 1e-10
    torch.testing.assert_close(
        dx.double(), inputs.grad, rtol=tolerance, atol=tolerance * inputs.grad.abs().max().item()
    )
    for key, value in wanted.items():
        torch.testing.assert_close(getattr(sums, key).double(), value, rtol=tolerance, atol=tolerance)


def test_without_kernels_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDO_KERNELS", "0")
    assert not usable(torch.zeros(2, 3, 4, 4), torch.ones(3))


@compiled
@pytest.mark.parametrize("bias", [True, False])
def test_the_compiled_sums_are_an_operator_of_torch(bias: bool) -> None:
    """Its schema, its shapes without data and its tracing, as torch itself checks them; and the profiler names it."""
    x, g, shape = tensors("groups", torch.float32)
    sizes = [list(part) for part in (shape.kernel, shape.stride, shape.padding, shape.dilation)]
    arguments = (x, g, *sizes, shape.groups, bias, 1.0)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.credo.conv_squares.default, arguments, test_utils=tests)
    with torch.profiler.profile() as profile:
        conv_sums(x, g, shape, bias=bias)
    assert "credo::conv_squares" in {event.name for event in profile.events()}
