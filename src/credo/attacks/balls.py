"""Constraint sets of attacks: the ball of radius epsilon around an input, intersected with the box of valid inputs.

Exact: rounding never leaves the ball (distances in float64) or the box.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from credo.attacks.common import distances, per_example
from credo.core.errors import unknown

NORMS = ("linf", "l2")


class Ball:
    """All inputs within `epsilon` of `x` and within the bounds.

    Args:
        x: Original inputs, [batch, ...].
        epsilon: Radius in the inputs' units, 0 or more.
        norm: `"linf"` or `"l2"`.
        bounds: Smallest and largest valid input value.
    """

    def __init__(self, x: Tensor, epsilon: float, norm: str, bounds: tuple[float, float]) -> None:
        check_ball(epsilon, norm)
        self.x, self.epsilon, self.norm = x, epsilon, norm
        self.low, self.high = box(bounds, x)
        if norm == "linf":
            self.lower = torch.maximum(_edge(x, -epsilon), self.low)
            self.upper = torch.minimum(_edge(x, epsilon), self.high)

    def project(self, candidate: Tensor) -> Tensor:
        """Project onto the ball: for linf the nearest point, for l2 a point on the way to x."""
        if self.norm == "linf":
            return torch.clamp(candidate, self.lower, self.upper)
        boxed = result = torch.clamp(candidate, self.low, self.high)
        scale = (self.epsilon / distances(boxed, self.x).clamp_min(1e-300)).clamp(max=1)
        # Shrink by 0, 1, 3, 7, … units in the last place, until rounding no longer leads outside.
        for doublings in range(64):
            over = distances(result, self.x) > self.epsilon * (1 - 1e-12)
            if not bool(over.any()):
                break
            shorter = scale * max(0.0, 1 - torch.finfo(boxed.dtype).eps * (2.0**doublings - 1))
            moved = torch.clamp(self.x + (boxed - self.x) * per_example(shorter, boxed), self.low, self.high)
            result = torch.where(over.reshape(-1, *[1] * (boxed.dim() - 1)), moved, result)
        return result

    def random(self, generator: torch.Generator) -> Tensor:
        """A point drawn uniformly from the ball, clipped to the box."""
        if self.norm == "linf":
            fraction = torch.rand(self.x.shape, generator=generator, dtype=self.x.dtype, device=self.x.device)
            return self.project(self.lower + (self.upper - self.lower) * fraction)
        direction = torch.randn(self.x.shape, generator=generator, dtype=self.x.dtype, device=self.x.device)
        length = torch.rand(len(self.x), generator=generator, dtype=self.x.dtype, device=self.x.device)
        length = self.epsilon * length ** (1 / max(1, self.x[0].numel()))
        return self.project(self.x + unit(direction) * per_example(length, self.x))

    def steepest(self, gradient: Tensor) -> Tensor:
        """Direction of steepest ascent with length 1 in this norm; zero where the gradient is zero."""
        return gradient.sign() if self.norm == "linf" else unit(gradient)


def check_ball(epsilon: float, norm: str) -> None:
    """Raise ValueError if the radius or the norm is invalid."""
    if norm not in NORMS:
        raise ValueError(unknown("norm", norm, NORMS))
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon} must be finite and 0 or more, in the inputs' units.")


def box(bounds: tuple[float, float], like: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds in the inputs' precision, rounded inwards."""
    low, high = (torch.tensor(bound, dtype=torch.float64) for bound in bounds)
    ends = []
    for bound, inner in ((low, high), (high, low)):
        end = bound.to(like.dtype)
        outside = (end.double() - bound) * (inner - bound).sign() < 0
        ends.append(torch.where(outside, torch.nextafter(end, inner.to(like.dtype)), end).to(like.device))
    return ends[0], ends[1]


def unit(direction: Tensor) -> Tensor:
    """Normalise each example's tensor to L2 norm 1; zero stays zero."""
    # Divide by the largest entry first: squares of tiny gradients underflow.
    largest = direction.flatten(1).abs().amax(1)
    scaled = direction / per_example(largest.clamp_min(torch.finfo(direction.dtype).tiny), direction)
    return scaled / per_example(scaled.flatten(1).norm(dim=1).clamp_min(0.5), direction)


def _edge(x: Tensor, shift: float) -> Tensor:
    """x + shift rounded towards x, so that |edge − x| ≤ |shift| even when computed in float64."""
    edge = (x.double() + shift).to(x.dtype)
    over = (edge.double() - x.double()).abs() > abs(shift)
    return torch.where(over, torch.nextafter(edge, x), edge)
