"""Hamiltonian dynamics of several chains: the leapfrog integrator and one Metropolis step, pure functions.

In units of a scale s for each weight (the mass is 1/s²), with velocities v ~ N(0, I):

    v ← v − ½ε s∇U(q),    q ← q + ε s v,    v ← v − ½ε s∇U(q),

which keeps volumes, runs backwards if v is reversed, and changes H = U(q) + ½‖v‖² by O(ε²) (Neal 2011).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Energy = Callable[[Tensor], tuple[Tensor, Tensor]]
# An energy error above this is a divergence, as in Stan.
DIVERGENCE = 1000.0


class Point(NamedTuple):
    """Where all chains are: weights [chains, weights], energies [chains], gradients [chains, weights]."""

    weights: Tensor
    energy: Tensor
    gradient: Tensor


class Move(NamedTuple):
    """What one transition did.

    Attributes:
        point: Where the chains are after it.
        proposal: Where their trajectories ended.
        velocity: The velocities there.
        accept: Probabilities of acceptance [chains].
        diverged: Which trajectories diverged.
    """

    point: Point
    proposal: Tensor
    velocity: Tensor
    accept: Tensor
    diverged: Tensor


def leapfrog(
    energy: Energy, start: Point, velocity: Tensor, *, step: float, steps: int, scale: Tensor
) -> tuple[Point, Tensor]:
    """Point and velocities after `steps` leapfrog steps.

    Args:
        energy: U and its gradient.
        start: Where the chains are.
        velocity: Their velocities, [chains, weights].
        step: Step size ε.
        steps: Number of steps, at least 1.
        scale: s, for each weight.
    """
    weights, gradient = start.weights, start.gradient
    drift, kick = step * scale, step * scale
    velocity = torch.addcmul(velocity, kick, gradient, value=-0.5)
    for index in range(steps):
        weights = torch.addcmul(weights, drift, velocity)
        value, gradient = energy(weights)
        velocity = torch.addcmul(velocity, kick, gradient, value=-1.0 if index < steps - 1 else -0.5)
    return Point(weights, value, gradient), velocity


def hamiltonian(point: Point, velocity: Tensor) -> Tensor:
    """U(q) + ½‖v‖² of each chain, in double precision."""
    return point.energy.double() + 0.5 * velocity.double().square().sum(1)


def transition(
    energy: Energy, point: Point, *, step: float, steps: int, scale: Tensor, generator: torch.Generator
) -> Move:
    """Move every chain along a trajectory with fresh velocities, and accept its end or stay.

    Args:
        energy: U and its gradient.
        point: Where the chains are.
        step: Step size ε.
        steps: Number of leapfrog steps.
        scale: s, for each weight.
        generator: Source of velocities and decisions.
    """
    like = point.weights
    velocity = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    chance = torch.rand(len(like), generator=generator, dtype=torch.double, device=like.device)
    before = hamiltonian(point, velocity)
    end, velocity = leapfrog(energy, point, velocity, step=step, steps=steps, scale=scale)
    error = (hamiltonian(end, velocity) - before).nan_to_num(nan=torch.inf)
    accept = torch.exp(-error.clamp(min=0.0))
    is_taken = (chance < accept) & end.gradient.isfinite().all(1)
    taken = is_taken.unsqueeze(1)
    new = Point(
        torch.where(taken, end.weights, point.weights),
        torch.where(is_taken, end.energy, point.energy),
        torch.where(taken, end.gradient, point.gradient),
    )
    return Move(new, end.weights, velocity, accept, ~(error < DIVERGENCE))
