"""Noise and Gaussian draws over flat vectors: compiled if possible, else in torch.

Compiled noise is a function of a key (one number from the posterior's generator) and the index in the vector, so the
backward pass can regenerate it instead of storing it; it costs a fifth of torch's. Both paths have the same
distribution but not the same numbers: `CREDO_KERNELS=0` gives torch's everywhere.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.kernels import build

INT64 = ctypes.c_int64
_KEYS = 2**63 - 1
# Below this many entries, another thread costs more than it saves.
_PER_THREAD = 1 << 14


@functools.lru_cache
def one(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The number 1 as a tensor, made once; nobody may change it."""
    with torch.inference_mode(False):
        return torch.ones((), device=device, dtype=dtype)


@functools.lru_cache
def zero(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The number 0 as a tensor, made once; nobody may change it."""
    with torch.inference_mode(False):
        return torch.zeros((), device=device, dtype=dtype)


def normal(size: int, generator: torch.Generator, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Standard normal noise as a vector.

    Args:
        size: Number of entries.
        generator: Advances by one number if compiled, by `size` otherwise.
        device: Device of the result.
        dtype: Type of the result.
    """
    kernels = kernels_for(device, dtype)
    if kernels is None:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)
    out = torch.empty(size, dtype=dtype, device=device)
    kernels.credo_normal(word(new_key(generator)), INT64(size), address(out), threads_for(size))
    return out


def gaussian(mean: Tensor, std: Tensor, generator: torch.Generator) -> Tensor:
    """Draw from N(mean, std²) independently for every entry, with noise from `generator`; mean and std of one shape."""
    kernels = kernels_for(mean.device, mean.dtype) if std.dtype is mean.dtype else None
    if kernels is None:
        z = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
        return z.mul_(std).add_(mean)
    mean, std = mean.contiguous(), std.contiguous()
    out = torch.empty_like(mean)
    size = mean.numel()
    kernels.credo_gaussian(
        address(mean), address(std), word(new_key(generator)), INT64(size), address(out), threads_for(size)
    )
    return out


def new_key(generator: torch.Generator) -> int:
    """Key of a compiled noise vector; advances `generator` by one number."""
    return int(torch.randint(_KEYS, (), generator=generator, device=generator.device))


def fused(tensors: Sequence[Tensor], *vectors: Tensor) -> bool:
    """Whether the compiled passes support these tensors."""
    fits = all(
        t.dtype is torch.float32 and t.device.type == "cpu" and t.is_contiguous() and type(t) in PLAIN
        for t in (*tensors, *vectors)
    )
    return fits and _kernels() is not None


# A subclass may keep its numbers anywhere.
PLAIN = (Tensor, nn.Parameter)


@functools.lru_cache
def _arrays(count: int) -> tuple[Any, Any]:
    """Types of arrays of addresses and of sizes."""
    return ctypes.c_void_p * count, INT64 * count


class TensorList:
    """Pointers to tensors that together form one flat vector, for the compiled passes.

    Args:
        tensors: In the vector's order; None stands for zeros.
        sizes: Entries of each, required where a tensor is None.
    """

    def __init__(self, tensors: Sequence[Tensor | None], sizes: Sequence[int] | None = None) -> None:
        sizes = [0 if t is None else t.numel() for t in tensors] if sizes is None else sizes
        self._tensors = tensors  # kept alive while their addresses are used
        self.count = len(tensors)
        addresses, numbers = _arrays(self.count)
        self.pointers: Any = addresses(*[None if t is None else t.data_ptr() for t in tensors])
        self.sizes: Any = numbers(*sizes)

    def others(self, tensors: Sequence[Tensor | None]) -> TensorList:
        """A list of other tensors with the same sizes."""
        new = object.__new__(TensorList)
        new._tensors, new.count, new.sizes = tensors, self.count, self.sizes
        new.pointers = _arrays(self.count)[0](*[None if t is None else t.data_ptr() for t in tensors])
        return new


def split(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of a vector with the names and shapes of `like`, in its order."""
    pieces = vector.split([tensor.numel() for tensor in like.values()])
    return {name: piece.view(like[name].shape) for name, piece in zip(like, pieces, strict=True)}


def softplus_draw(means: TensorList, rho: Tensor, key: int) -> Tensor:
    """means + softplus(rho)·noise(key) as one vector."""
    out = torch.empty_like(rho)
    loaded().credo_softplus_draw(
        means.pointers, means.sizes, INT64(means.count), address(rho), word(key), INT64(rho.numel()), address(out),
        threads_for(rho.numel()),
    )  # fmt: skip
    return out


class SoftplusDraws:
    """Makes draws of N(means, softplus(rho)²), one with each call; the means must not be freed or replaced meanwhile.

    Args:
        means: Tensors that together form the vector of means.
        rho: std = softplus(rho).
        generator: Advances by one number with each draw.
        split: Turns the vector of a draw into tensors by name.
    """

    def __init__(
        self,
        means: Sequence[Tensor],
        rho: Tensor,
        generator: torch.Generator,
        split: Callable[[Tensor], dict[str, Tensor]],
    ) -> None:
        self._means, self._rho, self._generator, self._split = TensorList(means), rho, generator, split

    def __call__(self) -> dict[str, Tensor]:
        """The next draw."""
        return self._split(softplus_draw(self._means, self._rho, new_key(self._generator)))


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
    """Backward pass of `softplus_draw` plus the gradient of the KL; returns (KL, squared norm of all gradients).

    The KL to N(prior_mean, 1/prior_precision) is returned without its constant −size/2 − (size/2)·log(precision).

    Args:
        means: Posterior means.
        rho: std = softplus(rho).
        key: Key of the draw's noise.
        gradients: Gradients with respect to the drawn weights.
        by_means: Receives the gradients of the means; may be `gradients` itself.
        by_rho: Receives the gradient of rho.
        add: Add to `by_means` and `by_rho` instead of overwriting them.
        kl_weight: Factor on the gradient of the KL.
        prior_mean: Mean of the Gaussian prior.
        prior_precision: 1/variance of the Gaussian prior.
    """
    sums = (ctypes.c_double * 2)()
    loaded().credo_softplus_back(
        means.pointers, means.sizes, INT64(means.count), address(rho), word(key), INT64(rho.numel()),
        gradients.pointers, by_means.pointers, address(by_rho), int(add), ctypes.c_float(kl_weight),
        ctypes.c_float(prior_mean), ctypes.c_float(prior_precision), sums, threads_for(rho.numel()),
    )  # fmt: skip
    return sums[0], sums[1]


class CompiledGradients:
    """Gradients by μ and ρ of N(μ, softplus(ρ)²), summed over the draws of one step in two compiled passes each.

    For tensors that are `fused`, and a Gaussian prior with one mean and std for all weights. Noise is computed again on
    the way back instead of being stored, the gradients of the first draw become those of the means in place, and those
    of the KL are added on the way.

    Args:
        means: The parameters μ, by name.
        rho: softplus⁻¹(σ), flat.
        prior: Mean and standard deviation of the prior.
        kl_weight: What the KL is multiplied by.
    """

    def __init__(
        self, means: Mapping[str, nn.Parameter], rho: nn.Parameter, prior: tuple[float, float], kl_weight: float
    ) -> None:
        self.parameters = [*means.values(), rho]
        self._named = means
        self._tensors = [p.detach() for p in means.values()]
        self._sizes = [p.numel() for p in self._tensors]
        self._means = TensorList(self._tensors, self._sizes)
        self._rho, self._kl_weight = rho.detach(), kl_weight
        self._prior_mean, self._precision = prior[0], 1 / prior[1] ** 2
        self._key: int | None = None
        self.eps = self._rho  # noise of the last draw, if it was given
        self._by_mean: list[Tensor] = []
        self._totals = self._means  # the same, once there are some
        self._by_rho: Tensor | None = None
        self._kl = 0.0
        self._squared_norm: float | None = None

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """A new draw w = μ + σ·ε, as leaves by name."""
        self._key = new_key(generator)
        return self._leaves(softplus_draw(self._means, self._rho, self._key))

    def draw_at(self, eps: Tensor) -> dict[str, Tensor]:
        """The draw with this noise, as leaves by name."""
        self._key, self.eps = None, eps
        return self._leaves(torch.addcmul(*self.moments(), eps))

    def _leaves(self, draw: Tensor) -> dict[str, Tensor]:
        return {name: piece.detach().requires_grad_() for name, piece in split(draw, self._named).items()}

    def moments(self) -> tuple[Tensor, Tensor]:
        """μ and σ as flat vectors, detached."""
        return torch.cat([tensor.reshape(-1) for tensor in self._tensors]), F.softplus(self._rho)

    def add(self, drawn: Mapping[str, Tensor], by_std: Tensor | None = None) -> bool:
        """Add the gradients of the last draw's weights, and with the first those of the KL; returns whether any is."""
        given = [drawn[name].grad for name in self._named]
        if self._key is not None:
            self._add_draw(given, self._key)
            return any(gradient is not None for gradient in given)
        if self._by_rho is None:
            self._add_draw([None] * len(given), 0)  # those of the KL alone
        assert self._by_rho is not None
        by_rho, factors = self._by_rho.split(self._sizes), torch.sigmoid(self._rho).mul_(self.eps).split(self._sizes)
        for gradient, total, part, factor in zip(given, self._by_mean, by_rho, factors, strict=True):
            if gradient is not None:
                total.add_(gradient)
                part.addcmul_(factor, gradient.reshape(-1))
        self._squared_norm = None
        return any(gradient is not None for gradient in given)

    def _add_draw(self, gradients: Sequence[Tensor | None], key: int) -> None:
        given = [None if gradient is None else gradient.contiguous() for gradient in gradients]
        listed = self._means.others(given)
        is_first = self._by_rho is None
        if self._by_rho is None:
            self._by_rho = torch.empty_like(self._rho)
            self._by_mean = [torch.zeros_like(t) if g is None else g for t, g in zip(self._tensors, given, strict=True)]
            self._totals = listed if all(g is not None for g in given) else self._means.others(self._by_mean)
        kl, self._squared_norm = softplus_back(
            self._means,
            self._rho,
            key,
            listed,
            self._totals,
            self._by_rho,
            add=not is_first,
            kl_weight=self._kl_weight if is_first else 0.0,
            prior_mean=self._prior_mean,
            prior_precision=self._precision,
        )
        self._kl = kl - 0.5 * len(self._rho) * (1 + math.log(self._precision))

    def add_kl(self, kl: object, weight: float) -> float:
        """The KL, whose gradients the first draw has added."""
        return self._kl

    add_gaussian_kl = add_kl

    def assign(self) -> float | None:
        """Add the sums to the parameters' `grad`; returns their squared norm where all of it is from draws."""
        *means, rho = self.parameters
        rho.grad = self._by_rho
        squared_norm = self._squared_norm
        for parameter, gradient in zip(means, self._by_mean, strict=True):
            # What the loss took from the mean itself, past the draw, counts as well.
            squared_norm = squared_norm if parameter.grad is None else None
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return squared_norm


def precision_draw(means: TensorList, curvature: Tensor, key: int, *, scale: float, shift: float) -> Tensor:
    """means + noise(key)·√(scale/(curvature + shift)) as one vector."""
    out = torch.empty_like(curvature)
    size = curvature.numel()
    loaded().credo_precision_draw(
        means.pointers, means.sizes, INT64(means.count), address(curvature), word(key), INT64(size),
        ctypes.c_float(scale), ctypes.c_float(shift), address(out), threads_for(size),
    )  # fmt: skip
    return out


def price_(
    hessian: Tensor, gradients: TensorList, curvature: Tensor, key: int, *, scale: float, shift: float, add: bool
) -> None:
    """Price's estimate of the Hessian's diagonal: gradients·noise(key)/std.

    Args:
        hessian: Receives the estimate.
        gradients: Gradients at the draw of `precision_draw` with the same curvature, key, scale and shift.
        curvature: As for `precision_draw`.
        key: As for `precision_draw`.
        scale: As for `precision_draw`.
        shift: As for `precision_draw`.
        add: Add to `hessian` instead of overwriting it.
    """
    size = curvature.numel()
    loaded().credo_price(
        gradients.pointers, gradients.sizes, INT64(gradients.count), address(curvature), word(key), INT64(size),
        ctypes.c_float(scale), ctypes.c_float(shift), ctypes.c_float(1.0), int(add), address(hessian),
        threads_for(size),
    )  # fmt: skip


class UpdateStruct(ctypes.Structure):
    """Hyper-parameters of one natural-gradient update, documented in flat.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_int if name == "coupled" else ctypes.c_float)
        for name in (
            "lr", "keep", "take", "debias", "decay", "renew", "shift", "damping", "prior_mean", "clip",
            "gradient_scale", "curvature_scale", "correction", "coupled", "variance", "prior_precision",
            "square_decay", "square_debias",
        )
    )  # fmt: skip


def update_(
    means: TensorList,
    gradients: TensorList,
    curvatures: TensorList,
    momentum: Tensor,
    curvature: Tensor,
    squares: Tensor | None,
    numbers: Mapping[str, float],
    *,
    dry: bool,
) -> tuple[float, float]:
    """One natural-gradient update in place; returns (KL before the update, squared norm of both gradients).

    Args:
        means: Posterior means.
        gradients: Accumulated gradients.
        curvatures: Accumulated curvature estimates.
        momentum: Running average of gradients.
        curvature: Running average of curvatures.
        squares: Running average of squared gradients, for steps of Adam; None: steps by the curvature.
        numbers: Fields of `UpdateStruct`.
        dry: Only compute the return values.
    """
    sums = (ctypes.c_double * 2)()
    size = momentum.numel()
    loaded().credo_update(
        means.pointers, gradients.pointers, curvatures.pointers, means.sizes, INT64(means.count), address(momentum),
        address(curvature), None if squares is None else address(squares), INT64(size),
        ctypes.byref(UpdateStruct(**numbers)), int(dry), sums, threads_for(size),
    )  # fmt: skip
    return sums[0], sums[1]


def kernels_for(device: torch.device, dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled passes, where they take tensors of this kind; else None."""
    return _kernels() if device.type == "cpu" and dtype is torch.float32 else None


def _kernels() -> ctypes.CDLL | None:
    found = build._loaded.get("flat")
    if found is None or "CREDO_KERNELS" in os.environ:
        return build.library("flat")
    build._used["flat"] = True
    return found


def loaded() -> ctypes.CDLL:
    """The compiled passes, once `fused` or `kernels_for` has found them."""
    kernels = build._loaded["flat"]
    assert kernels is not None
    return kernels


def threads_for(size: int) -> int:
    """Number of threads for `size` entries."""
    return max(1, min(torch.get_num_threads(), size // _PER_THREAD))


def address(tensor: Tensor) -> ctypes.c_void_p:
    """Data pointer of the tensor."""
    return ctypes.c_void_p(tensor.data_ptr())


def word(key: int) -> ctypes.c_uint64:
    """A key as a C type."""
    return ctypes.c_uint64(key)
