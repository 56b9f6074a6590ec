"""Derivatives of an objective by means and standard deviations, gathered by hand from its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from credo.core.kernels import flat
from credo.core.prior import Gaussian

Of = Callable[[Tensor, Tensor], Tensor]


class Slopes:
    """Sums of derivatives at one pair of flat vectors, means and standard deviations."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self.at_mean, self.at_std = mean, std
        self.mean, self.std = torch.zeros_like(mean), torch.zeros_like(std)
        self.rho: Tensor | None = None

    def add_weights(self, slope: Tensor, eps: Tensor) -> None:
        """Derivatives by w = mean + std·eps; `slope` is used up."""
        self.mean.add_(slope)
        self.std.add_(slope.mul_(eps))

    def add(self, function: Of, weight: float) -> float:
        """`weight` times the derivatives of a function of means and deviations; returns the function's value."""
        mean, std = self.at_mean.detach().requires_grad_(), self.at_std.detach().requires_grad_()
        value = function(mean, std)
        for_mean, for_std = torch.autograd.grad(value, (mean, std))
        self.mean.add_(for_mean, alpha=weight)
        self.std.add_(for_std, alpha=weight)
        return value.item()

    def add_rho(self, function: Callable[[Tensor], Tensor], rho: Tensor, weight: float) -> float:
        """The same for a function of ρ alone, whose derivatives are kept by themselves."""
        at = rho.detach().requires_grad_()
        value = function(at)
        self.rho = torch.autograd.grad(value, at)[0] * weight
        return value.item()


class FusedSlopes:
    """The same sums for w = mean + softplus(rho)·ε and a Gaussian prior, in two compiled passes a draw.

    Noise is made anew on the way back instead of being kept. The first draw's own gradients become the means' ones.
    """

    def __init__(self, means: Mapping[str, Tensor], rho: Tensor, prior: Gaussian, generator: torch.Generator) -> None:
        self._names, self._tensors = tuple(means), [p.detach() for p in means.values()]
        self._sizes = [p.numel() for p in self._tensors]
        self._means = flat.TensorList(self._tensors, self._sizes)
        self._rho, self._prior, self._generator = rho.detach(), prior, generator
        self._key = 0
        self.mean: list[Tensor] = []
        self.rho: Tensor | None = None
        self.kl = 0.0
        self.squares: float | None = None

    @staticmethod
    def covers(means: Mapping[str, Tensor], rho: Tensor, prior: Any) -> bool:
        """Whether these passes exist for the tensors and the prior."""
        if type(prior) is not Gaussian or isinstance(prior.mean, Tensor) or isinstance(prior.std, Tensor):
            return False
        return flat.fused([*means.values(), rho])

    def draw(self) -> Tensor:
        """A new draw, flat."""
        self._key = flat.new_key(self._generator)
        return flat.softplus_draw(self._means, self._rho, self._key)

    def add_weights(self, gradients: Mapping[str, Tensor | None], kl_weight: float) -> None:
        """Derivatives by the last draw, and with the first of them `kl_weight` times those of the KL."""
        given = [None if (g := gradients[name]) is None else g.contiguous() for name in self._names]
        first = self.rho is None
        if self.rho is None:
            self.rho = torch.empty_like(self._rho)
            self.mean = [torch.zeros_like(t) if g is None else g for t, g in zip(self._tensors, given, strict=True)]
        precision = 1 / float(self._prior.std) ** 2
        kl, self.squares = flat.softplus_back(
            self._means,
            self._rho,
            self._key,
            flat.TensorList(given, self._sizes),
            flat.TensorList(self.mean, self._sizes),
            self.rho,
            add=not first,
            kl_weight=kl_weight if first else 0.0,
            prior_mean=float(self._prior.mean),
            prior_precision=precision,
        )
        self.kl = kl - 0.5 * len(self._rho) * (1 + math.log(precision))

    def add_noise(self, gradients: Mapping[str, Tensor | None], eps: Tensor, kl_weight: float) -> None:
        """Derivatives by w = mean + softplus(rho)·eps, noise that has no key; the squared norm is not known after."""
        if self.rho is None:
            self._key = 0
            self.add_weights(dict.fromkeys(self._names), kl_weight)
        assert self.rho is not None
        slope = torch.sigmoid(self._rho).mul_(eps).split(self._sizes)
        for name, total, by_rho, factor in zip(self._names, self.mean, self.rho.split(self._sizes), slope, strict=True):
            given = gradients[name]
            if given is not None:
                total.add_(given)
                by_rho.addcmul_(factor, given.reshape(-1))
        self.squares = None
