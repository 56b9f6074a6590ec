"""Noise and Gaussian draws over flat vectors: compiled where that is possible, else by torch.

The compiled noise is a function of a key (one number from the posterior's generator) and of the place in the vector.
It can be made twice instead of being kept, and costs a fifth of torch's. Both paths have the same distribution, but not
the same numbers: `CREDO_KERNELS=0` gives torch's everywhere.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from credo.core.kernels.build import library

_INT64 = ctypes.c_int64
_KEYS = 2**63 - 1
# Below this, waking a second thread costs more than it saves.
_PER_THREAD = 1 << 14


def normal(size: int, generator: torch.Generator, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`size` standard normals."""
    kernels = _kernels(device, dtype)
    if kernels is None:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)
    out = torch.empty(size, dtype=dtype, device=device)
    kernels.credo_normal(_word(new_key(generator)), _INT64(size), _at(out), _threads(size))
    return out


def gaussian(mean: Tensor, std: Tensor, generator: torch.Generator) -> Tensor:
    """A draw of N(mean, std²), entry by entry; both of one shape."""
    kernels = _kernels(mean.device, mean.dtype) if std.dtype is mean.dtype else None
    if kernels is None:
        z = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
        return z.mul_(std).add_(mean)
    mean, std = mean.contiguous(), std.contiguous()
    out = torch.empty_like(mean)
    size = mean.numel()
    kernels.credo_gaussian(_at(mean), _at(std), _word(new_key(generator)), _INT64(size), _at(out), _threads(size))
    return out


def can_drop(x: Tensor) -> bool:
    """Whether `dropped` takes this tensor: a plain one in single precision on the CPU, outside torch.func."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)  # type: ignore[attr-defined]
    return type(x) in _PLAIN and not wrapped and _kernels(x.device, x.dtype) is not None


def dropped(x: Tensor, rate: float, key: int) -> Tensor:
    """x with a share `rate` of its entries zero, chosen by the key, and the others over 1 − rate.

    Of the mask only the key is kept until backward, which makes it again.
    """
    channels_last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    result: Tensor = _Dropped.apply(x, rate, key, torch.channels_last if channels_last else torch.contiguous_format)
    return result


class _Dropped(torch.autograd.Function):
    """`dropped`; the order of entries in memory is given, since the mask belongs to places there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, key: int, order: torch.memory_format) -> Tensor:
        ctx.numbers = rate, key, order
        x = x.contiguous(memory_format=order)
        out = torch.empty_like(x)
        size, scale = x.numel(), ctypes.c_float(1 / (1 - rate))
        least = ctypes.c_uint32(min(round(rate * 2**32), 2**32 - 1))
        _loaded().credo_dropout(_at(x), _word(key), _INT64(size), least, scale, _at(out), _threads(size))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Dropped.apply(gradients[0], *ctx.numbers), None, None, None


def scaled_rows(x: Tensor, scale: Tensor) -> Tensor:
    """x [rows, features, …] times scale [rows, features], whose derivatives come in one pass over x and the gradient.

    For tensors that `can_scale` says yes to.
    """
    result: Tensor = _ScaledRows.apply(x, scale)
    return result


def can_scale(x: Tensor, scale: Tensor) -> bool:
    """Whether `scaled_rows` takes these: plain, contiguous, in single precision on the CPU, with rows worth it."""
    plain = all(type(t) in _PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(t) for t in (x, scale))  # type: ignore[attr-defined]
    return plain and x.dim() > 2 and x.dtype is scale.dtype and x.is_contiguous() and bool(_kernels(x.device, x.dtype))


class _ScaledRows(torch.autograd.Function):
    """`scaled_rows`; the way back can be differentiated again, by torch's own passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        scale, out = scale.contiguous(), torch.empty_like(x)
        rows, threads = scale.numel(), _threads(x.numel())
        _loaded().credo_scale_rows(_at(x), _at(scale), _INT64(rows), _INT64(math.prod(x.shape[2:])), _at(out), threads)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor]:
        x, scale = ctx.saved_tensors
        (g,) = gradients
        wide = scale.reshape(*scale.shape, *[1] * (x.dim() - 2))
        if torch.is_grad_enabled() and (x.requires_grad or scale.requires_grad or g.requires_grad):
            return g * wide, (g * x).flatten(2).sum(2)
        g, scale = g.contiguous(), scale.contiguous()
        by_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        by_scale = torch.empty_like(scale)
        _loaded().credo_scale_rows_back(
            _at(x), _at(scale), _at(g), _INT64(scale.numel()), _INT64(math.prod(x.shape[2:])),
            None if by_x is None else _at(by_x), _at(by_scale), _threads(x.numel()),
        )  # fmt: skip
        return by_x, by_scale


def new_key(generator: torch.Generator) -> int:
    """A key for compiled noise; the generator moves on by one number."""
    return int(torch.randint(_KEYS, (), generator=generator, device=generator.device))


def fused(tensors: Sequence[Tensor], *vectors: Tensor) -> bool:
    """Whether compiled passes can be used for these tensors."""
    return library("flat") is not None and all(
        t.dtype is torch.float32 and t.device.type == "cpu" and t.is_contiguous() and type(t) in _PLAIN
        for t in (*tensors, *vectors)
    )


# A subclass may keep its numbers anywhere.
_PLAIN = (Tensor, torch.nn.Parameter)


class TensorList:
    """Tensors that lie behind one another in a flat vector, as the compiled passes take them."""

    def __init__(self, tensors: Sequence[Tensor | None], sizes: Sequence[int] | None = None) -> None:
        sizes = [0 if t is None else t.numel() for t in tensors] if sizes is None else sizes
        self._tensors = tensors  # kept alive while their addresses are used
        self.count = len(tensors)
        self.pointers = (ctypes.c_void_p * self.count)(*(None if t is None else t.data_ptr() for t in tensors))
        self.sizes = (_INT64 * self.count)(*sizes)


def softplus_draw(means: TensorList, rho: Tensor, key: int) -> Tensor:
    """means + softplus(rho)·noise(key), as one vector."""
    out = torch.empty_like(rho)
    _loaded().credo_softplus_draw(
        means.pointers, means.sizes, _INT64(means.count), _at(rho), _word(key), _INT64(rho.numel()), _at(out),
        _threads(rho.numel()),
    )  # fmt: skip
    return out


def softplus_back(
    means: TensorList,
    rho: Tensor,
    key: int,
    gradients: TensorList,
    by_means: TensorList,
    by_rho: Tensor,
    *,
    add: bool,
    kl_weight: float,
    prior_mean: float,
    prior_precision: float,
) -> tuple[float, float]:
    """Derivatives by means and rho from those by the draw with this key, plus `kl_weight` times the KL's.

    Written to `by_means` (which may be `gradients` itself) and `by_rho`, or added to what is there. Returns the KL to
    N(prior_mean, 1/prior_precision) up to its constant −size/2 − (size/2)·log(precision), and the sum of squares of
    all derivatives.
    """
    sums = (ctypes.c_double * 2)()
    _loaded().credo_softplus_back(
        means.pointers, means.sizes, _INT64(means.count), _at(rho), _word(key), _INT64(rho.numel()), gradients.pointers,
        by_means.pointers, _at(by_rho), int(add), ctypes.c_float(kl_weight), ctypes.c_float(prior_mean),
        ctypes.c_float(prior_precision), sums, _threads(rho.numel()),
    )  # fmt: skip
    return sums[0], sums[1]


def precision_draw(means: TensorList, curvature: Tensor, key: int, *, scale: float, shift: float) -> Tensor:
    """means + noise(key)·√(scale/(curvature + shift)), as one vector."""
    out = torch.empty_like(curvature)
    size = curvature.numel()
    _loaded().credo_precision_draw(
        means.pointers, means.sizes, _INT64(means.count), _at(curvature), _word(key), _INT64(size),
        ctypes.c_float(scale), ctypes.c_float(shift), _at(out), _threads(size),
    )  # fmt: skip
    return out


def price_(
    hessian: Tensor, gradients: TensorList, curvature: Tensor, key: int, *, scale: float, shift: float, add: bool
) -> None:
    """gradients·noise(key)/std, the std that of `precision_draw`, written or added to `hessian`."""
    size = curvature.numel()
    _loaded().credo_price(
        gradients.pointers, gradients.sizes, _INT64(gradients.count), _at(curvature), _word(key), _INT64(size),
        ctypes.c_float(scale), ctypes.c_float(shift), ctypes.c_float(1.0), int(add), _at(hessian), _threads(size),
    )  # fmt: skip


class Update(ctypes.Structure):
    """The numbers of one natural-gradient update; flat.cpp says what they mean."""

    _fields_ = tuple(
        (name, ctypes.c_int if name == "coupled" else ctypes.c_float)
        for name in (
            "lr", "keep", "take", "debias", "decay", "renew", "shift", "damping", "prior_mean", "clip",
            "gradient_scale", "curvature_scale", "correction", "coupled", "variance", "prior_precision",
        )
    )  # fmt: skip


def update_(
    means: TensorList,
    gradients: TensorList,
    curvatures: TensorList,
    momentum: Tensor,
    curvature: Tensor,
    numbers: Mapping[str, float],
    *,
    dry: bool,
) -> tuple[float, float]:
    """One update of means, momentum and curvature; `dry` changes nothing and returns KL and squared norm instead."""
    sums = (ctypes.c_double * 2)()
    size = momentum.numel()
    _loaded().credo_update(
        means.pointers, gradients.pointers, curvatures.pointers, means.sizes, _INT64(means.count), _at(momentum),
        _at(curvature), _INT64(size), ctypes.byref(Update(**numbers)), int(dry), sums, _threads(size),
    )  # fmt: skip
    return sums[0], sums[1]


def _kernels(device: torch.device, dtype: torch.dtype) -> ctypes.CDLL | None:
    return library("flat") if device.type == "cpu" and dtype is torch.float32 else None


def _loaded() -> ctypes.CDLL:
    kernels = library("flat")
    assert kernels is not None  # `fused` was asked first
    return kernels


def _threads(size: int) -> int:
    return max(1, min(torch.get_num_threads(), size // _PER_THREAD))


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _word(key: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(key)
