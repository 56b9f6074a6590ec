"""Where an attack may go: the ball of radius epsilon around an input, cut by the box of possible inputs.

Exactly: no rounding leads outside, neither of the ball (distances taken in float64) nor of the box.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from credo.attacks.common import distances, per_example
from credo.core.errors import unknown

NORMS = ("linf", "l2")


class Ball:
    """All inputs within `epsilon` of `x` in the norm `"linf"` or `"l2"` and within the bounds."""

    def __init__(self, x: Tensor, epsilon: float, norm: str, bounds: tuple[float, float]) -> None:
        check_ball(epsilon, norm)
        self.x, self.epsilon, self.norm = x, epsilon, norm
        self.low, self.high = box(bounds, x)
        if norm == "linf":
            self.lower = torch.maximum(_edge(x, -epsilon), self.low)
            self.upper = torch.minimum(_edge(x, epsilon), self.high)

    def project(self, candidate: Tensor) -> Tensor:
        """The candidate if it is inside; else the nearest point of a cube, or one on the way to x in an L2 ball."""
        if self.norm == "linf":
            return torch.clamp(candidate, self.lower, self.upper)
        boxed = result = torch.clamp(candidate, self.low, self.high)
        scale = (self.epsilon / distances(boxed, self.x).clamp_min(1e-300)).clamp(max=1)
        # Shorter by nothing, by a unit in the last place, by three, …: rounding may have gone outwards everywhere.
        for doublings in range(64):
            over = distances(result, self.x) > self.epsilon * (1 - 1e-12)
            if not bool(over.any()):
                break
            shorter = scale * max(0.0, 1 - torch.finfo(boxed.dtype).eps * (2.0**doublings - 1))
            moved = torch.clamp(self.x + (boxed - self.x) * per_example(shorter, boxed), self.low, self.high)
            result = torch.where(over.reshape(-1, *[1] * (boxed.dim() - 1)), moved, result)
        return result

    def random(self, generator: torch.Generator) -> Tensor:
        """A point drawn uniformly from the ball, moved into the box."""
        if self.norm == "linf":
            share = torch.rand(self.x.shape, generator=generator, dtype=self.x.dtype, device=self.x.device)
            return self.project(self.lower + (self.upper - self.lower) * share)
        direction = torch.randn(self.x.shape, generator=generator, dtype=self.x.dtype, device=self.x.device)
        length = torch.rand(len(self.x), generator=generator, dtype=self.x.dtype, device=self.x.device)
        length = self.epsilon * length ** (1 / max(1, self.x[0].numel()))
        return self.project(self.x + unit(direction) * per_example(length, self.x))

    def steepest(self, gradient: Tensor) -> Tensor:
        """The direction of length 1, in this norm, that ascends most; zero where there is no gradient."""
        return gradient.sign() if self.norm == "linf" else unit(gradient)


def check_ball(epsilon: float, norm: str) -> None:
    """Refuse a radius or a norm that cannot be."""
    if norm not in NORMS:
        raise ValueError(unknown("norm", norm, NORMS))
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon} must be a finite number, 0 or more, in the inputs' units.")


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
    """Each example's tensor with L2 norm 1; zero stays zero."""
    # By the largest entry first: the squares of tiny gradients underflow.
    largest = direction.flatten(1).abs().amax(1)
    scaled = direction / per_example(largest.clamp_min(torch.finfo(direction.dtype).tiny), direction)
    return scaled / per_example(scaled.flatten(1).norm(dim=1).clamp_min(0.5), direction)


def _edge(x: Tensor, shift: float) -> Tensor:
    """x + shift, rounded towards x: |edge − x| ≤ |shift| also for the one who computes it in float64."""
    edge = (x.double() + shift).to(x.dtype)
    over = (edge.double() - x.double()).abs() > abs(shift)
    return torch.where(over, torch.nextafter(edge, x), edge)
