"""Gradients by μ and ρ of q(w) = N(μ, σ²), accumulated over weight draws w = μ + σ·ε.

The chain rule is applied by hand: ∂w/∂μ = 1 and ∂w/∂σ = ε, then ∂σ/∂ρ. `TorchGradients` does so for every posterior,
`flat.CompiledGradients` for the most common one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from credo.core.deferred import Later, Number
from credo.core.kernels import flat
from credo.core.network.flat_layout import Layout
from credo.methods.bbb.std_parameterization import StdParameterization

# A function of (μ, σ, ρ), flat vectors.
KL = Callable[[Tensor, Tensor, Tensor], Tensor]


class TorchGradients:
    """Sums over the draws of one step, for every prior, kind of noise and parameterisation of σ.

    Args:
        means: The parameters μ, by name.
        rho: The parameter of σ, flat.
        parameterization: How σ follows from μ and ρ.
        layout: Where each tensor of `means` lies in the flat vector.
    """

    def __init__(
        self,
        means: Mapping[str, nn.Parameter],
        rho: nn.Parameter,
        parameterization: StdParameterization,
        layout: Layout,
    ) -> None:
        self.parameters = [*means.values(), rho]
        self.rho, self._parameterization, self.layout = rho.detach(), parameterization, layout
        with torch.no_grad():
            self.mean = layout.flatten(means)
            self.std = parameterization.std(self.mean, self.rho, layout)
        self.by_mean = self.by_std = self._nothing = torch.zeros(
            (), device=rho.device
        )  # vectors once something is added
        self._by_rho: Tensor | None = None
        self.eps = self.mean  # noise of the last draw

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """A new draw w = μ + σ·ε, as leaves by name."""
        return self.draw_at(flat.normal(len(self.mean), generator, device=self.rho.device, dtype=self.rho.dtype))

    def draw_at(self, eps: Tensor) -> dict[str, Tensor]:
        """The draw with this noise, as leaves by name."""
        self.eps = eps
        weights = self.layout.split(torch.addcmul(self.mean, self.std, eps))
        return {name: weight.detach().requires_grad_() for name, weight in weights.items()}

    def moments(self) -> tuple[Tensor, Tensor]:
        """μ and σ as flat vectors, detached."""
        return self.mean, self.std

    def add(self, drawn: Mapping[str, Tensor], by_std: Tensor | None = None) -> bool:
        """Add the gradients of the last draw; returns whether there were any.

        Args:
            drawn: Its weights, by name, with their `grad`.
            by_std: What the pass took from σ itself, flat.
        """
        if by_std is not None:
            self._start()
            self.by_std.add_(by_std)
        if all(weight.grad is None for weight in drawn.values()):  # all of its noise was in activations
            return False
        whole = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in drawn.items()}
        gradient = self.layout.flatten(whole).detach()
        if self.by_mean is self._nothing:
            self.by_mean, self.by_std = gradient, gradient * self.eps
        else:
            self.by_mean.add_(gradient)
            self.by_std.add_(gradient.mul_(self.eps))
        return True

    def _start(self) -> None:
        if self.by_mean is self._nothing:
            self.by_mean, self.by_std = torch.zeros_like(self.mean), torch.zeros_like(self.std)

    def add_kl(self, kl: KL, weight: float) -> Number:
        """Add `weight` times the gradients of a function of (μ, σ, ρ); returns its value."""
        self._start()
        at = [tensor.detach().requires_grad_() for tensor in (self.mean, self.std, self.rho)]
        value = kl(*at)
        by_mean, by_std, by_rho = torch.autograd.grad(value, at, allow_unused=True)
        if by_mean is not None:
            self.by_mean.add_(by_mean, alpha=weight)
        if by_std is not None:
            self.by_std.add_(by_std, alpha=weight)
        if by_rho is not None:
            self._by_rho = by_rho * weight
        return Later(value.detach())

    def add_gaussian_kl(self, prior: tuple[float, float], weight: float) -> Number:
        """The same for the KL to N(m, s²), one m and s for all weights: Σ log(s/σ) + (σ² + (μ − m)²)/(2s²) − ½.

        Args:
            prior: m and s.
            weight: Factor of the gradients.
        """
        self._start()
        center, scale = prior
        std, offset = self.std, self.mean - center if center else self.mean
        self.by_mean.add_(offset, alpha=weight / scale**2)
        one = flat.one(std.device, std.dtype)
        self.by_std.add_(std, alpha=weight / scale**2).addcdiv_(one, std, value=-weight)
        squares, offsets, logs, size = std.dot(std), offset.dot(offset), std.log().sum(), std.numel()
        constant = size * (math.log(scale) - 0.5)
        return Later(lambda: (squares.item() + offsets.item()) / (2 * scale**2) - logs.item() + constant)

    def assign(self) -> None:
        """Add the sums to the parameters' `grad`; their norm is not known."""
        self._start()
        by_rho = self._parameterization.chain_(self)
        *means, rho = self.parameters
        rho.grad = by_rho if self._by_rho is None else by_rho.add_(self._by_rho)
        for parameter, gradient in zip(means, self.layout.split(self.by_mean).values(), strict=True):
            # The means of layers with activation noise have a gradient already.
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


GaussianGradients = TorchGradients | flat.CompiledGradients
