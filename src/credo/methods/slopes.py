"""Derivatives of an objective by means and standard deviations, gathered by hand from its parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Of = Callable[[Tensor, Tensor], Tensor]


class Slopes:
    """Sums of derivatives at one pair of flat vectors, means and standard deviations."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self.at_mean, self.at_std = mean, std
        self.mean, self.std = torch.zeros_like(mean), torch.zeros_like(std)

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
